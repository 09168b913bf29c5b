"""A histogram that is cheap to add to, one value or an array at a time. Counts are not cumulative. Pure."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from protocol.messages import HistogramData


class Histogram:
    """`bounds`: ascending inclusive upper borders; one more bucket takes what is greater than the last."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, once or several times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Count each of `values` [n]; cheap if all are equal, as those of rows that decode together are."""
        if not len(values):
            return
        least = values.min()
        if least == values.max():
            self.observe(float(least), len(values))
            return
        for place, count in enumerate(np.bincount(np.searchsorted(self._bounds, values)).tolist()):
            self.counts[place] += count
        self.total += float(values.sum())

    @property
    def data(self) -> HistogramData:
        """What has been counted, for the wire."""
        return HistogramData(tuple(self.counts), self.total)
