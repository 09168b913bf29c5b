"""Several runs of several targets become medians and ratios. Pure.

Machines drift by 20% and more from hour to hour, so absolute numbers of different times can't be compared. The rounds
of one run are interleaved (A B A B A B): the ratio of a round sets two neighbours in time side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.quantiles import median
from bench.stats import METRICS, RunStats


@dataclass(frozen=True)
class Spread:
    """A metric over the rounds of one target: the median of the rounds' values, and the extremes."""

    median: float | None  # None, in all three: no round has the metric
    min: float | None
    max: float | None


@dataclass(frozen=True)
class Ratio:
    """subject / baseline of one metric."""

    ratio: float | None  # median of the subject's rounds / median of the baseline's; None where one has none or is 0
    min: float | None  # least and greatest of the ratios within one round
    max: float | None
    rounds: list[float]  # the ratios within one round, in order


@dataclass(frozen=True)
class Comparison:
    subject: str  # name of a target
    baseline: str  # name of another
    metrics: dict[str, Ratio]  # by the names of bench.stats.METRICS


def summarise(runs: Sequence[RunStats]) -> dict[str, Spread]:
    """Each metric over the rounds of one target."""
    summary = {}
    for metric in METRICS:
        values = [value for run in runs if (value := getattr(run, metric)) is not None]
        summary[metric] = Spread(median(values), min(values, default=None), max(values, default=None))
    return summary


def compare(subject: str, baseline: str, runs: Mapping[str, Sequence[RunStats]]) -> Comparison:
    """Every metric of `subject` over that of `baseline`. Round i of one was neighbour of round i of the other."""
    metrics = {}
    for metric in METRICS:
        ours = [getattr(run, metric) for run in runs[subject]]
        theirs = [getattr(run, metric) for run in runs[baseline]]
        paired = [_divide(a, b) for a, b in zip(ours, theirs, strict=True)]
        rounds = [ratio for ratio in paired if ratio is not None]
        metrics[metric] = Ratio(
            ratio=_divide(median(ours), median(theirs)),
            min=min(rounds, default=None),
            max=max(rounds, default=None),
            rounds=rounds,
        )
    return Comparison(subject, baseline, metrics)


def _divide(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
