"""Named arrays side by side in one buffer of bytes, so that a step's inputs cross to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: the widest load of a GPU, and what Triton compiles its kernels for."""

_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}

Arrays = Mapping[str, NDArray[Any]]
"""name → int32 or int64 [n]."""


class Layout:
    """Where each array lies, by the order, lengths and dtypes of `arrays`. Equal ones have an equal layout, whatever
    comes behind them."""

    def __init__(self, arrays: Arrays) -> None:
        self._places: dict[str, tuple[np.dtype[Any], int, int]] = {}
        self.end = 0
        """The first byte behind it."""
        for name, array in arrays.items():
            begin, end = self.end, self.end + array.nbytes
            self._places[name] = (array.dtype, begin, end)
            self.end = -(-end // ALIGNMENT) * ALIGNMENT

    def write(self, arrays: Arrays, buffer: Tensor) -> None:
        """Put the arrays in their places; buffer: uint8 [>= end], in host memory."""
        data = buffer.numpy()
        for name, (dtype, begin, end) in self._places.items():
            data[begin:end].view(dtype)[:] = arrays[name]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays as views of buffer (uint8 [>= end], anywhere)."""
        return {name: buffer[begin:end].view(_TORCH[dtype]) for name, (dtype, begin, end) in self._places.items()}
