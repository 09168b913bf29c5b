"""What a step needs of a device: inputs up, results down, both beside the model, and recorded decode steps.

`HostDevice` is the same over host memory, where all work is done when a call returns: the code above has one form, and
its tests need no GPU. `cuda_device` has the other implementation. Neither knows what a step is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Body = Callable[[], Tensor]


class Mark(Protocol):
    """A point in a queue of the device's work."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def microseconds_since(self, earlier: Mark) -> int:
        """The device's time between two points that it has passed."""
        ...


class Device(Protocol):
    """One queue computes; what the model and the sampler enqueue goes there. The copies below go beside it."""

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], uninitialised. If dropped, its memory is used again only once copies of it are done."""
        ...

    def device_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] for uploads, uninitialised."""
        ...

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Copy; whatever is enqueued to compute after this call waits for it. `host` must not change until then."""
        ...

    def download(self, device: Tensor, host: Tensor) -> Mark:
        """Copy what the computing queue has made so far; once the mark is passed it is in `host`."""
        ...

    def mark(self) -> Mark:
        """Here in the computing queue."""
        ...

    def record(self, body: Body) -> Body:
        """Run `body` as often as it needs to, and return what does the same work over the same addresses again.

        Its result always has the same address: it is good until the next replay of anything recorded on this device.
        """
        ...


class HostDevice:
    """No device: everything happens at once, in order."""

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def download(self, device: Tensor, host: Tensor) -> Mark:
        host.copy_(device)
        return HostMark()

    def mark(self) -> Mark:
        return HostMark()

    def record(self, body: Body) -> Body:
        """Nothing is recorded: a replay runs the body, and its result lies where the first one lay."""
        result: Tensor | None = None

        def replay() -> Tensor:
            nonlocal result
            result = body().clone() if result is None else result.copy_(body())
            return result

        return replay


class HostMark:
    """A point that has been passed already."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, HostMark)
        return int((self.at - earlier.at) * 1e6)


def make_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return HostDevice()
    from worker.cuda_device import CudaDevice

    return CudaDevice(device)
