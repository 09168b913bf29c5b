"""Where a kernel can run: compiled on a GPU, interpreted on the CPU. Elsewhere its caller uses torch."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from kernels.triton import interpreter


def can_run(kernel: Any, tensor: Tensor) -> bool:
    """Whether `kernel` runs where `tensor` lies. TRITON_INTERPRET decides when a kernel is imported, not later."""
    if isinstance(kernel, triton.JITFunction):
        return tensor.device.type == "cuda"  # also what torch calls an AMD GPU
    interpreter.install()
    return tensor.device.type == "cpu"


def check_same_device(**tensors: Tensor | None) -> None:
    """ValueError, which names the tensors, if they lie on different devices: a kernel would read a wild address."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError("tensors on different devices: " + ", ".join(f"{n} on {d}" for n, d in devices.items()))
