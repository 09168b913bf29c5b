"""Samples of a duration and what is said of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. The field names are the keys of `--json`, and stay."""

    median_us: float
    min_us: float
    max_us: float
    p25_us: float
    p75_us: float
    samples: int
    calls_per_sample: int
    timed_by: str  # "clock", "graph" (CUDA graph between events) or "events" (launches between events)
    cold: bool  # whether what a call reads had left the caches: its inputs take turns with enough others

    @staticmethod
    def of(samples_us: Sequence[float], *, calls_per_sample: int, timed_by: str, cold: bool) -> Timing:
        """Raises ValueError for no sample."""
        if not samples_us:
            raise ValueError("no sample, no timing")
        if len(samples_us) == 1:
            low = middle = high = samples_us[0]
        else:
            low, middle, high = statistics.quantiles(samples_us, n=4, method="inclusive")
        return Timing(
            middle, min(samples_us), max(samples_us), low, high, len(samples_us), calls_per_sample, timed_by, cold
        )
