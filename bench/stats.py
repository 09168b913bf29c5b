"""From arrival times to the numbers of a run. Pure: no sockets, no clock. All times are seconds.

Definitions, for one request sent at time 0 whose chunks arrive at t_1 < t_2 < … with k_1, k_2, … tokens:
  TTFT     t_1, the time to the first token.
  ITL      one interval for each token after the first. The k_i tokens of a later chunk share the wait for it evenly:
           k_i intervals of (t_i - t_(i-1)) / k_i. Further tokens of the first chunk came with it: k_1 - 1 intervals
           of 0. So the intervals of a request always add up to (time of the last token) - TTFT, merged or not.
  stall    the longest wait between two chunks: what merging does cost the reader.
  e2e      the time to the last token.
Percentiles are over all completed requests of the run (TTFT, e2e) or all their intervals (ITL).
A request is completed if it brought exactly the tokens it was asked for; every other one is failed, and counts
nowhere but in `failed`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestRecord:
    """What one request saw. Times are seconds on the run's clock."""

    output_len: int  # tokens asked for
    start_s: float  # when it was sent
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, new tokens) of each chunk, in order
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def failure(self) -> str | None:
        """Why it isn't completed, or None if it is."""
        if self.error is not None:
            return self.error
        if self.num_tokens != self.output_len:
            return f"{self.num_tokens} tokens came, {self.output_len} were asked for"
        return None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.arrivals[-1][0] - self.start_s

    @property
    def stall_s(self) -> float:
        times = [time for time, _ in self.arrivals]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def itl_s(self) -> list[float]:
        """num_tokens - 1 intervals, whose sum is e2e_s - ttft_s."""
        last, first_count = self.arrivals[0]
        intervals = [0.0] * (first_count - 1)
        for time, count in self.arrivals[1:]:
            intervals += [(time - last) / count] * count
            last = time
        return intervals


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, 0 <= q <= 100, interpolated linearly between ranks (Hyndman and Fan 1996, type 7).

    None of no values. The input needn't be sorted.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q} is not in 0…100")
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float | None]) -> float | None:
    """Median of the values that are there; None if none is."""
    return percentile([value for value in values if value is not None], 50)


@dataclass(frozen=True)
class RunStats:
    """One target, one round. The field names are the keys of `--json`, and stay."""

    duration_s: float  # from the first request sent to the last token of all
    completed: int  # requests
    failed: int  # requests
    output_tokens: int  # of completed requests
    output_tokens_per_s: float  # output_tokens / duration_s
    requests_per_s: float  # completed / duration_s
    ttft_p50_s: float | None  # None, here and below: no request completed
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    itl_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p90_s: float | None
    e2e_p99_s: float | None
    stall_p50_s: float | None
    stall_p99_s: float | None
    stall_max_s: float | None
    errors: dict[str, int]  # reason -> number of failed requests


METRICS = tuple(
    name
    for name in RunStats.__dataclass_fields__
    if name not in ("completed", "failed", "output_tokens", "errors", "duration_s")
)
HIGHER_IS_BETTER = frozenset({"output_tokens_per_s", "requests_per_s"})


def run_stats(records: Sequence[RequestRecord]) -> RunStats:
    """The numbers of one run. Raises ValueError if there is no record."""
    if not records:
        raise ValueError("a run without requests has no statistics")
    done = [record for record in records if record.failure is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.failure is not None:
            errors[record.failure] = errors.get(record.failure, 0) + 1
    start = min(record.start_s for record in records)
    end = max((time for record in records for time, _ in record.arrivals[-1:]), default=start)
    duration = end - start
    tokens = sum(record.num_tokens for record in done)
    ttft = [record.ttft_s for record in done]
    itl = [interval for record in done for interval in record.itl_s()]
    e2e = [record.e2e_s for record in done]
    stall = [record.stall_s for record in done]
    return RunStats(
        duration_s=duration,
        completed=len(done),
        failed=len(records) - len(done),
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration if duration > 0 else 0.0,
        requests_per_s=len(done) / duration if duration > 0 else 0.0,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=percentile(itl, 50),
        itl_p90_s=percentile(itl, 90),
        itl_p99_s=percentile(itl, 99),
        e2e_p50_s=percentile(e2e, 50),
        e2e_p90_s=percentile(e2e, 90),
        e2e_p99_s=percentile(e2e, 99),
        stall_p50_s=percentile(stall, 50),
        stall_p99_s=percentile(stall, 99),
        stall_max_s=max(stall, default=None),
        errors=errors,
    )
