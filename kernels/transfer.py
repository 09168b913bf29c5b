"""Small arrays of the host on their way to a device, without anybody waiting for the copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, copied in the device's compute queue.

    On the CPU it shares the array's memory. On the way to a GPU it lies in pinned memory of its own, which torch hands
    out again only once the copy is done, so the caller may drop or rewrite the array at once.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
