"""Whole blocks of the cache copied, the same for every backend: torch's indexing does it on any device."""

from __future__ import annotations

from torch import Tensor

from kernels.quantise import as_stored


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """In each cache, blocks dst[i] become copies of src[i] (int64 [n]), as if all at once; dst are distinct."""
    for cache in map(as_stored, caches):
        cache[dst] = cache[src]  # the right side is gathered first, so chains read the old content
