"""The sliding window, to the key: in prefill, in decode, and when the blocks in front of it have been freed."""

from __future__ import annotations

import pytest
import torch
from devices import device_of, metadata_to, to_device

from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata

LAST = 40
NULL_BLOCK = 0
HEAD_DIM = 48  # one dimension for each position


def seen(backend: AttentionBackend, metadata: AttentionMetadata, caches: tuple, window: int) -> torch.Tensor:
    """Which positions each query weighs: all scores are 0, and the value at position p is the p-th unit vector."""
    device = device_of(backend)
    q = torch.zeros((metadata.num_tokens, 1, HEAD_DIM), device=device)
    out = torch.empty_like(q)
    k_cache, v_cache = (to_device(cache, device) for cache in caches)
    backend.paged_attention(q, k_cache, v_cache, metadata_to(metadata, device), scale=1.0, window=window, out=out)
    return out[:, 0, : LAST + 1].cpu()


@pytest.mark.parametrize("block_size", range(1, 9))
def test_every_position_sees_exactly_its_window(backend: AttentionBackend, block_size: int) -> None:
    num_blocks = -(-(LAST + 1) // block_size)
    table = list(range(num_blocks, 0, -1))
    k_cache = torch.full((num_blocks + 1, 1, block_size, HEAD_DIM), float("nan"))
    v_cache = k_cache.clone()
    for p in range(LAST + 1):
        k_cache[table[p // block_size], 0, p % block_size] = 0
        v_cache[table[p // block_size], 0, p % block_size] = torch.eye(HEAD_DIM)[p]
    # interpreted: a thousand times slower
    windows = ((1, 4, 9)[block_size % 3],) if backend.name == "triton" else range(1, 10)
    for window in windows:
        visible = torch.ones(LAST + 1, LAST + 1).tril().triu(1 - window)  # dense mask [query, key]
        expected = visible / visible.sum(1, keepdim=True)
        prefill = AttentionMetadata.build([LAST + 1], [LAST + 1], [table], block_size)
        torch.testing.assert_close(seen(backend, prefill, (k_cache, v_cache), window), expected)

        freed = [max(0, p - window + 1) // block_size for p in range(LAST + 1)]
        rows = [
            [NULL_BLOCK if b < freed[p] or b > p // block_size else table[b] for b in range(num_blocks)]
            for p in range(LAST + 1)
        ]
        decode = AttentionMetadata.build([1] * (LAST + 1), list(range(1, LAST + 2)), rows, block_size)
        torch.testing.assert_close(seen(backend, decode, (k_cache, v_cache), window), expected)


def test_the_first_block_in_sight() -> None:
    """W = 4, B = 4, position 8: key 5 is the first in sight, so one block is free to go."""
    from kernels.reference import visible_keys

    assert visible_keys(8, 4) == range(5, 9)
    assert visible_keys(8, 4).start // 4 == 1
    assert visible_keys(2, 4) == range(3)
    assert visible_keys(3, None) == range(4)
