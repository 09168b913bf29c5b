"""Memory that a step reads much of, in large pages where the system has them. Knows no kernel.

A core that streams through ordinary pages of 4 KiB waits for address translations as much as for memory, and its
prefetching stops at each border: on the machine of docs/performance.md it reads 11 GB/s so, and 15 GB/s in pages of
2 MiB. Linux gives those to whoever asks (`madvise`), unless transparent_hugepage is "never".
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of its own pages, zeros until written; no memory is taken before a page is touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # which keeps the pages
    start = -memory.data_ptr() % LARGE_PAGE
    return memory[start : start + num_bytes].view(dtype).view(shape)


class Arena:
    """Tensors one behind the other, in the order in which they were asked for: small ones too lie in large pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Not initialised, 64-byte aligned. Its chunk of memory stays as long as any tensor in it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        needed = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if needed > len(self._free):
            self._free = empty((max(CHUNK, needed),), torch.uint8)
        memory, self._free = self._free[:num_bytes], self._free[needed:]
        return memory.view(dtype).view(shape)
