"""A device that computes nothing and takes its time over it: one queue, beside a host that is free meanwhile."""

from __future__ import annotations

import time

from torch import Tensor

from worker.device import HostDevice, Mark


class SimulatedDevice(HostDevice):
    """Memory and copies are the host's, done at once; only what `compute` enqueues lasts."""

    def __init__(self) -> None:
        self._busy_until = 0.0
        """Of time.monotonic()."""

    def compute(self, seconds: float) -> None:
        """Enqueue work that the device spends so long on, once it has done what was enqueued before."""
        self._busy_until = self._next() + seconds

    def mark(self) -> Mark:
        return SimulatedMark(self._next())

    def download(self, device: Tensor, host: Tensor) -> Mark:
        host.copy_(device)
        return self.mark()

    def _next(self) -> float:
        """When it would begin with what is enqueued now."""
        return max(self._busy_until, time.monotonic())


class SimulatedMark:
    """The moment at which the queue gets to it."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        while (left := self.at - time.monotonic()) > 0:
            time.sleep(left)

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, SimulatedMark)
        return int((self.at - earlier.at) * 1e6)
