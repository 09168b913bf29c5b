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
        self.counts: NDArray[np.int64] = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Count each of `values` [n]."""
        if len(values):
            places = np.searchsorted(self._bounds, values)
            self.counts += np.bincount(places, minlength=len(self.counts))
            self.total += float(values.sum())

    @property
    def data(self) -> HistogramData:
        """What has been counted, for the wire."""
        return HistogramData(tuple(self.counts.tolist()), self.total)
