"""A device that is always behind: it makes known what a host must not take for granted.

Work is done when it is enqueued, since that is what torch does on the CPU. But a result lies in host memory only once
the host has waited for its mark, and is garbage before; and what a host buffer held when it was sent is compared when
the device would have read it. How far the device is, is drawn at random.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from worker.device import HostDevice, Mark

GARBAGE = -99


class LateDevice(HostDevice):
    """`progress`: how likely the device has come one item further whenever the host asks it anything."""

    def __init__(self, progress: float = 0.5, seed: int = 0) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._random = random.Random(seed)
        self._progress = progress
        self._enqueued = 0
        self.passed = 0
        """Items of work done."""
        self.progressed = threading.Condition()
        self.owner = threading.get_ident()
        """The thread whose calls move time on; others really wait."""

    def upload(self, host: Tensor, device: Tensor) -> None:
        super().upload(host, device)
        sent = host.clone()

        def read() -> None:
            assert torch.equal(host, sent), "a buffer was rewritten before the device had read it"

        self._enqueue(read)

    def download(self, device: Tensor, host: Tensor) -> Mark:
        host.fill_(GARBAGE)
        self._enqueue(lambda: host.copy_(device))
        return self.mark()

    def mark(self) -> Mark:
        self._enqueue(lambda: None)
        return LateMark(self, self._enqueued)

    def pass_until(self, item: int) -> None:
        while self.passed < item:
            self._queue.popleft()()
            with self.progressed:
                self.passed += 1
                self.progressed.notify_all()

    def drift(self) -> None:
        """Time passes."""
        while self._queue and self._random.random() < self._progress:
            self.pass_until(self.passed + 1)

    def _enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self._enqueued += 1
        self.drift()


class LateMark:
    def __init__(self, device: LateDevice, item: int) -> None:
        self.device = device
        self.item = item

    def query(self) -> bool:
        self.device.drift()
        return self.device.passed >= self.item

    def synchronize(self) -> None:
        if threading.get_ident() == self.device.owner:
            self.device.pass_until(self.item)
        else:
            with self.device.progressed:
                self.device.progressed.wait_for(lambda: self.device.passed >= self.item)

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, LateMark)
        assert self.device.passed >= self.item > earlier.item, "the device has no time of what it has not done"
        return self.item - earlier.item
