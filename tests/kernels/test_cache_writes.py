"""write_kv and copy_blocks: what is written is right, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from conftest import backends_for
from devices import device_of, to_device
from paged_world import TOLERANCES, bits, poisoned

from kernels import reference
from kernels.backend import AttentionBackend
from kernels.quantise import LIMITS, quantise
from kernels.selector import AttentionShape


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


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("kv_dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_what_is_quantised_is_rounded_and_clamped_as_defined(
    dtype: torch.dtype, kv_dtype: torch.dtype, sliced: bool
) -> None:
    """To the bit, with scales per head, values far out of range, infinities and NaN; slots beside stay as they were."""
    shape = AttentionShape("cpu", dtype, 80, 24, kv_dtype=kv_dtype, sliced_cache=sliced)
    backends = [spec.load(num_threads=1) for spec in backends_for(shape)]
    assert {backend.name for backend in backends} >= {"torch", "triton"}
    k, v = (torch.randn((9, 3, 80)) * torch.logspace(-4, 3, 80) for _ in range(2))
    k[4, :, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    k, v = k.to(dtype), v.to(dtype)
    k_scale, v_scale = torch.tensor([1.0, 0.013, 3.0]), torch.tensor([0.5, 0.07, 1.0])
    slots = torch.randperm(3 * 24)[:9] + 24
    slots[3] = -1
    expected = [poisoned((4, 3, 24, 80), kv_dtype, sliced=sliced) for _ in range(2)]
    pools = [cache if cache._base is None else cache._base for cache in expected]
    untouched = [pool.clone() for pool in pools]
    reference.write_kv(k, v, *expected, slots, k_scale, v_scale)
    for backend in backends:
        device = device_of(backend)
        actual_pools = [pool.to(device, copy=True) for pool in untouched]
        actual = [
            torch.as_strided(pool, cache.shape, cache.stride(), cache.storage_offset())
            for pool, cache in zip(actual_pools, expected, strict=True)
        ]
        arguments = [to_device(x, device) for x in (k, v)]
        scales = [scale.to(device) for scale in (k_scale, v_scale)]
        backend.write_kv(*arguments, *actual, slots.to(device), *scales)
        for pool, wanted in zip(actual_pools, pools, strict=True):
            assert torch.equal(bits(pool.cpu()), bits(wanted))


def test_quantised_numbers_by_hand() -> None:
    x = torch.tensor([0.0, 2.5, 3.5, -2.5, 200.0, -1e9, float("nan")])[None, None]
    one, half = torch.tensor([1.0]), torch.tensor([0.5])
    assert quantise(x, one, torch.int8).flatten().tolist() == [0, 2, 4, -2, 127, -127, 0]
    assert quantise(x, half, torch.int8).flatten().tolist() == [0, 5, 7, -5, 127, -127, 0]
    # of four-bit fractions from 16 to 32 the even ones are there: 17 lies between 16 and 18, and takes the even one
    y = torch.tensor([17.0, 19.0, 448.0, 464.0, 1e9, -float("inf")])[None, None]
    assert quantise(y, one, torch.float8_e4m3fn).float().flatten().tolist() == [16, 20, 448, 448, 448, -448]
    assert quantise(x, one, torch.float8_e4m3fn).float()[0, 0, 6].isnan()


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
    ran = {name: count - before[name] for name, count in backend.counters.items() if count != before[name]}
    assert ran == {"write_kv": 1, "copy_blocks": 1}
