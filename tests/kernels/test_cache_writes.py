"""write_kv and copy_blocks: what is written is right, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from devices import device_of, to_device
from paged_world import TOLERANCES, bits

from kernels import reference
from kernels.backend import AttentionBackend


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("block_size", "head_dim", "num_kv_heads"), [(16, 64, 3), (4, 80, 1), (24, 32, 2), (1, 16, 4)])
def test_only_the_slots_named_are_written(
    backend: AttentionBackend, dtype: torch.dtype, block_size: int, head_dim: int, num_kv_heads: int
) -> None:
    num_blocks, num_tokens = 40 // block_size + 2, 23
    device = device_of(backend)
    fused = torch.randn((num_tokens, 5 + 2 * num_kv_heads, head_dim)).to(dtype)
    k, v = fused[:, 5 : 5 + num_kv_heads], fused[:, 5 + num_kv_heads :]  # strided views
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size  # never the null block's
    slots[[0, 7, num_tokens - 1]] = -1  # padding
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    expected = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    actual = [cache.clone().to(device) for cache in expected]
    backend.write_kv(to_device(k, device), to_device(v, device), *actual, slots.to(device))
    reference.write_kv(k, v, *expected, slots)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(bits(a.cpu()), bits(e))


def test_a_step_without_tokens_writes_nothing(backend: AttentionBackend) -> None:
    cache = torch.full((2, 1, 4, 16), float("nan"))
    empty = torch.empty((0, 1, 16))
    backend.write_kv(empty, empty, cache, cache, torch.empty(0, dtype=torch.int64))
    assert cache.isnan().all()


def test_blocks_are_copied_as_if_all_at_once(backend: AttentionBackend) -> None:
    """A chain 1 → 2 → 3: each gets the old content of its source; other blocks stay."""
    device = device_of(backend)
    caches = [torch.randn((6, 2, 4, 16), device=device) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    backend.copy_blocks(caches, torch.tensor([1, 2, 5], device=device), torch.tensor([2, 3, 4], device=device))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 1, 2, 5, 5]])


def test_counters_count_what_ran(backend: AttentionBackend) -> None:
    before, device = dict(backend.counters), device_of(backend)
    cache = torch.zeros((3, 1, 4, 16), device=device)
    k = torch.zeros((1, 1, 16), device=device)
    backend.write_kv(k, k, cache, cache.clone(), torch.tensor([5], device=device))
    backend.copy_blocks([cache], torch.tensor([1], device=device), torch.tensor([2], device=device))
    assert {name: backend.counters[name] - before[name] for name in before} == {
        "write_kv": 1,
        "paged_attention": 0,
        "copy_blocks": 1,
    }
