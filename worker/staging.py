"""Buffers on the way to a device, lent out in turn: none is lent again while anything in flight still reads it.

A host buffer that is rewritten while a copy of it waits behind slow work hands the device the wrong step's data, and
nothing crashes. So a borrower says at which point of the device's work a buffer is free again.
"""

from __future__ import annotations

from torch import Tensor, uint8

from worker.device import Device, Mark


class Staged:
    """A host buffer and the device buffer that it is copied to, uint8 of one size. The borrower may write the first
    until it uploads, and sets `free_after` once all work that reads either is enqueued."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host = host
        self.device = device
        self.free_after: Mark | None = None


class StagingRing:
    """`depth` buffers. With one more than the steps in flight, `acquire` never waits."""

    def __init__(self, device: Device, depth: int = 3) -> None:
        if depth < 1:
            raise ValueError(f"a ring needs at least one buffer, not {depth}")
        self._device = device
        self._lent: list[Staged | None] = [None] * depth
        self._next = 0
        self.waits = 0
        """How often acquire had to wait for the device."""

    def acquire(self, num_bytes: int) -> Staged:
        """The buffer lent out longest ago, of at least `num_bytes`, once nothing reads it any more."""
        staged = self._lent[self._next]
        if staged is not None and staged.free_after is not None and not staged.free_after.query():
            self.waits += 1
            staged.free_after.synchronize()
        if staged is None or len(staged.host) < num_bytes:
            size = num_bytes if staged is None else max(num_bytes, 2 * len(staged.host))
            staged = Staged(self._device.host_buffer(size, uint8), self._device.device_buffer(size))
            self._lent[self._next] = staged
        self._next = (self._next + 1) % len(self._lent)
        staged.free_after = None
        return staged
