"""copy_blocks and gather_kv: copies count as made all at once, and nothing but what was named is read or written."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_world import bits
from triton_ops import DEVICE, DTYPES, FORMS, assert_rounded, computed_by, copies, name_of

from kernels import reference


@st.composite
def copy_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sources and distinct destinations among 9 blocks: chains, rings, forks and copies onto themselves."""
    dst = draw(st.lists(st.integers(0, 8), unique=True, max_size=9))
    return [draw(st.integers(0, 8)) for _ in dst], dst


@given(pairs=copy_lists())
def test_copies_in_the_planned_order_are_copies_all_at_once(pairs: tuple[list[int], list[int]]) -> None:
    src, dst = pairs
    plan = copies.plan_copies(src, dst)
    blocks, expected = list(range(9)), list(range(9))
    for s, d in zip(src, dst, strict=True):
        expected[d] = s
    written: list[set[int]] = []
    for first, end, saved_id in reversed(plan.chains.tolist()):  # whatever their order
        saved = blocks[saved_id] if saved_id >= 0 else None
        for s, d in plan.copies[first:end].tolist():
            value = blocks[s] if s >= 0 else saved
            assert value is not None
            blocks[d] = value
        written.append(set(plan.copies[first:end, 1].tolist()))
    assert blocks == expected
    # chains run side by side: none may read or write what another writes
    for number, (first, end, saved_id) in enumerate(reversed(plan.chains.tolist())):
        read = {*plan.copies[first:end, 0].tolist(), saved_id} - {-1}
        for other, blocks_written in enumerate(written):
            assert other == number or not (read | written[number]) & blocks_written


def test_copies_without_chains_run_side_by_side() -> None:
    plan = copies.plan_copies([1, 1, 2, 3], [5, 6, 7, 8])
    assert len(plan.chains) == 4 and (plan.chains[:, 2] == -1).all()


def test_a_long_chain_needs_no_deep_stack() -> None:
    plan = copies.plan_copies(list(range(5000)), list(range(1, 5001)))
    assert plan.copies[:, 1].tolist() == list(range(5000, 0, -1)) and len(plan.chains) == 1


def test_a_block_overwritten_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks \[4\] are destinations twice"):
        copies.plan_copies([1, 2, 3], [4, 4, 5])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(pairs=copy_lists(), shape=st.sampled_from([(2, 4, 16), (3, 5, 7), (1, 1, 3), (2, 24, 80)]))
def test_blocks_are_copied_in_all_caches(
    form: str, pairs: tuple[list[int], list[int]], shape: tuple[int, int, int]
) -> None:
    src, dst = (torch.tensor(ids, dtype=torch.int64) for ids in pairs)
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        caches = [(100 * torch.randn((9, *shape))).to(dtype).to(DEVICE) for _ in range(3)]
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            cache[dst] = cache[src]
        with computed_by(form, copies) if len(src) else nullcontext():
            copies.copy_blocks(caches, src, dst)
        for cache, wanted in zip(caches, expected, strict=True):
            assert torch.equal(cache, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_blocks_of_a_sliced_pool_are_copied_bit_by_bit(form: str, dtype: torch.dtype) -> None:
    """K and V interleaved in one pool: a block of each is contiguous, the next one lies further. NaN is copied too."""
    pool = torch.randn((6, 2, 2, 16, 24)).to(dtype).to(DEVICE)
    pool[3, :, 0, 2] = float("nan")
    before = bits(pool).clone()
    with computed_by(form, copies):
        copies.copy_blocks([pool[:, 0], pool[:, 1]], torch.tensor([1, 3, 2]), torch.tensor([2, 4, 1]))
    assert torch.equal(bits(pool), before[[0, 2, 1, 3, 3, 5]])


def test_more_than_one_piece_of_a_block() -> None:
    cache = torch.randn((4, 8, 16, 72), device=DEVICE)  # 36,864 bytes
    before = cache.clone()
    with computed_by("kernel", copies):
        copies.copy_blocks([cache], torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert torch.equal(cache, before[[0, 3, 1, 2]])


def test_copies_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros((4, 2, 8, 16), device=DEVICE)
    one = torch.tensor([1])
    for caches, src, dst, message in (
        ([cache], one, torch.tensor([4]), "outside of the cache's 4"),
        ([cache], one.int(), one, "must be int64"),
        ([cache], one, torch.tensor([2, 3]), "must be int64"),
        ([cache, cache[:, :1]], one, one, "cache 1 is"),
        ([cache.transpose(1, 2)], one, one, "blocks of cache 0 are not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            copies.copy_blocks(caches, src, dst)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("block_size", "head_dim", "heads"), [(16, 64, 3), (4, 80, 1), (48, 32, 2), (1, 24, 4)])
def test_gathering_undoes_writing(form: str, dtype: torch.dtype, block_size: int, head_dim: int, heads: int) -> None:
    num_tokens, num_blocks = 37, 60 // block_size + 2
    k, v = (torch.randn((num_tokens, heads, head_dim)).to(dtype) for _ in range(2))
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slots[[0, 9, num_tokens - 1]] = -1
    caches = [torch.full((num_blocks, heads, block_size, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    reference.write_kv(k, v, *caches, slots)
    pool = torch.stack(caches, dim=1).to(DEVICE)  # K and V interleaved: each is a strided slice
    with computed_by(form, copies):
        gathered = copies.gather_kv(pool[:, 0], pool[:, 1], slots.to(DEVICE))
    for actual, written in zip(gathered, (k, v), strict=True):
        assert torch.equal(actual.cpu(), torch.where((slots >= 0)[:, None, None], written, 0).to(dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_quantised_cache_is_scaled_by_head(form: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (
        (40 * torch.randn((5, 2, 8, 48), generator=generator)).to(cache_dtype).to(DEVICE) for _ in range(2)
    )
    k_scale, v_scale = torch.tensor([0.25, 3.0], device=DEVICE), torch.tensor([1e-3, 1.0], device=DEVICE)
    slots = torch.tensor([39, 8, -1, 17], device=DEVICE)
    with computed_by(form, copies):
        k, v = copies.gather_kv(k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale, dtype=dtype)
    for actual, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        exact = cache.double()[slots // 8, :, slots % 8] * scale.double()[:, None]
        exact[2] = 0
        assert_rounded(actual, exact, sums=1e-6)


def test_a_gather_that_does_not_fit_is_refused() -> None:
    cache, slots = torch.zeros((4, 2, 8, 16), device=DEVICE), torch.tensor([9], device=DEVICE)
    scale = torch.ones(2, device=DEVICE)
    for changed, message in (
        ({"v_cache": cache[:, :1]}, "caches must be alike"),
        ({"slots": slots.int()}, "slots must be contiguous int64"),
        ({"k_scale": scale}, "together or not at all"),
        ({"k_scale": scale, "v_scale": scale[:1]}, r"v_scale must be float32 \[2\]"),
        ({"k_cache": cache.mT, "v_cache": cache.mT}, "last dimension of the caches"),
    ):
        with pytest.raises(ValueError, match=message):
            copies.gather_kv(**({"k_cache": cache, "v_cache": cache, "slots": slots} | changed))
