"""Percentile and median. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
