"""Memory that a step reads much of, in large pages where the system has them. Knows no kernel.

A core that streams through ordinary pages of 4 KiB waits for address translations as much as for memory, and its
prefetching stops at each border: on the machine of docs/performance.md it reads 11 GB/s so, and 15 GB/s in pages of
2 MiB. Linux gives those to whoever asks (`madvise`), unless transparent_hugepage is "never".
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64
POPULATE_WRITE = 23
"""What madvise makes ready as if it were written to, from Linux 5.14 on; before that, pages come when they are used."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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


class Ahead:
    """Touches large pages of some tensors shortly before somebody writes there for the first time.

    The kernel takes 0.2 ms for a new large page, and 10 ms if it has to ask the host of a virtual machine for it. The
    blocks of a KV cache lie at the same place of a tensor for each layer and of K and V, and are handed out from the
    first to the last. So once in some thousand tokens a step would come to a new page in all tensors, 60 of them for
    instance, and last half a second. Instead a few are touched for each block that is handed out, up to the page behind
    those in use in each tensor. A thread does that, beside the steps: the kernel makes pages ready without the GIL, and
    contents stay as they are whoever writes meanwhile.
    """

    PER_BLOCK = 2.0
    """Of the bytes of a block, those that are touched when one is handed out: so this stays in front."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: of one shape [num_blocks, ...], made by `empty` and not small."""
        self._tensors = tensors
        self._bytes = tensors[0].numel() * tensors[0].element_size()
        self._block_bytes = self._bytes // tensors[0].shape[0]
        self._highest = 0
        self._owed = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages")
        self._last: Future[None] | None = None
        self.touched = 0
        """Pages so far, or in a moment: the first of each tensor, then the second of each, and so on."""
        self.total = len(tensors) * -(-self._bytes // LARGE_PAGE)

    def handed_out(self, num_blocks: int, highest: int) -> None:
        """So many blocks are in use that were not, the last of which lies there."""
        self._highest = max(self._highest, highest)
        width = len(self._tensors)
        limit = min(self.total, width * (self._highest * self._block_bytes // LARGE_PAGE + 2))
        self._owed += self.PER_BLOCK * num_blocks * width * self._block_bytes / LARGE_PAGE
        end = min(self.touched + int(self._owed), limit)
        self._owed = min(self._owed - (end - self.touched), 1.0)  # what is not needed yet is not done in one go later
        if end > self.touched:
            self._last = self._thread.submit(self._touch, range(self.touched, end))
        self.touched = end

    def _touch(self, pages: range) -> None:
        for page in pages:
            row, tensor = divmod(page, len(self._tensors))
            start = row * LARGE_PAGE
            address = self._tensors[tensor].data_ptr() + start
            _madvise(address, min(LARGE_PAGE, self._bytes - start), POPULATE_WRITE)

    def settle(self) -> None:
        """Return when all that was counted as touched is."""
        if self._last is not None:
            self._last.result()
