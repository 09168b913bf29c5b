"""The Triton kernels' own promises: the work list, split key ranges, and independence of the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import triton_here
from hypothesis import given
from hypothesis import strategies as st
from paged_world import World, assert_close, make_queries, make_world

from kernels.backend import AttentionBackend
from kernels.triton.plan import plan_attention

triton_here()  # decides how the kernels are imported

from kernels.triton.backend import StepShape, TritonBackend  # noqa: E402
from kernels.triton.interpreter import round_to_bfloat16  # noqa: E402

LENGTHS = [(1, 1), (1, 64), (1, 65), (1, 200), (3, 130), (70, 150), (1, 0)]
"""(query tokens, tokens visible): decode, chunks, a row of padding."""


def world_of(**features: object) -> tuple[World, list[int]]:
    world = make_world(
        [n for _, n in LENGTHS], heads=(6, 2), head_dim=64, block_size=16, dtype=torch.float32, **features
    )
    return world, [q for q, _ in LENGTHS]


@pytest.mark.parametrize(
    ("split_size", "features"),  # one tile a part, or two: more parts than a sequence has tiles
    [
        (64, {}),
        (64, {"window": 70}),
        (128, {"soft_cap": 3.0}),
        (64, {"sinks": True, "window": 70}),  # counted once, however many parts
        (128, {"sinks": True, "causal": False}),
        (64, {"causal": False, "window": 70}),
        (64, {"kv_dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_split_key_ranges_give_what_float64_gives(split_size: int, features: dict) -> None:
    world, query_lens = world_of(**features)
    metadata = world.metadata(query_lens)
    q = make_queries(world, metadata.num_tokens)
    backend = TritonBackend(split_size)
    assert_close(world.attend(backend, q, metadata), world.expected(q, metadata), backend)


def test_nan_is_not_lost_between_the_parts_of_a_split() -> None:
    """A broken row has a part without a sum; it must not pass for a part without keys."""
    world = make_world([200, 200], heads=(3, 1), head_dim=32, block_size=16, dtype=torch.float32)
    world.k_cache[world.tables[0][5], :, 3, 7] = float("nan")
    out = world.attend(TritonBackend(64), make_queries(world, 2), world.metadata([1, 1]))
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


FEATURES = [{}, {"window": 70, "sinks": True}, {"kv_dtype": torch.int8, "soft_cap": 5.0}]


@pytest.mark.parametrize(("split_size", "features"), [(2048, {}), *((64, features) for features in FEATURES)], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(split_size: int, features: dict) -> None:
    backend: AttentionBackend = TritonBackend(split_size)
    world, query_lens = world_of(**features)
    queries = [make_queries(world, n, seed=s) for s, n in enumerate(query_lens)]
    together = world.attend(backend, torch.cat(queries), world.metadata(query_lens)).split(query_lens)
    for s, expected in enumerate(together):
        alone = world.pick([s])
        assert torch.equal(world.attend(backend, queries[s], alone.metadata([query_lens[s]])), expected)


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_chunks_of_a_prefill_have_the_bits_of_the_whole(features: dict) -> None:
    backend = TritonBackend(64)
    world = make_world([100], heads=(3, 1), head_dim=64, block_size=16, dtype=torch.bfloat16, **features)
    q = make_queries(world, 100)
    whole = world.attend(backend, q, world.metadata([100]))
    for begin, end in itertools.pairwise([0, 2, 64, 71, 100]):
        out = world.attend(backend, q[begin:end], world.metadata([end - begin], [end]))
        assert torch.equal(out, whole[begin:end])


def test_no_neighbour_changes_a_bit() -> None:
    """Not one that is longer, shorter, empty or broken, before it or behind."""
    backend = TritonBackend(64)
    world = make_world([150, 260, 0, 3, 64], heads=(6, 2), head_dim=64, block_size=16, dtype=torch.bfloat16)
    world.k_cache[world.tables[1]] = float("nan")
    q = make_queries(world, 1)
    alone = world.attend(backend, q, world.pick([0]).metadata([1]))
    for order in ([0, 1], [2, 3, 0], [4, 1, 0, 3]):
        query_lens = [1 if s == 0 else min(world.seq_lens[s], 5) for s in order]
        at = sum(query_lens[: order.index(0)])
        queries = make_queries(world, sum(query_lens), seed=7)
        queries[at] = q[0]
        out = world.attend(backend, queries, world.pick(order).metadata(query_lens))
        assert torch.equal(out[at], alone[0])


def test_a_work_list_is_made_once_a_step() -> None:
    backend = TritonBackend()
    world, query_lens = world_of()
    metadata = world.metadata(query_lens)
    shape = StepShape(group=3, head_dim=64, page=16, window=None)
    first = backend._launches(metadata, shape)
    assert backend._launches(metadata, shape) is first
    assert backend._launches(world.metadata(query_lens), shape) is not first


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=6),
    block_q=st.integers(1, 16),
    tile=st.sampled_from([16, 32]),
    split_tiles=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 80)),
)
def test_every_visible_pair_is_computed_exactly_once(
    lengths: list[tuple[int, int]], block_q: int, tile: int, split_tiles: int, window: int | None
) -> None:
    query_lens, seq_lens = [q for q, _ in lengths], [q + context for q, context in lengths]
    split = tile * split_tiles
    work = plan_attention(
        query_lens, seq_lens, range(len(lengths)), block_q=block_q, tile=tile, split_size=split, window=window
    )
    count = [np.zeros((q, n), dtype=int) for q, n in zip(query_lens, seq_lens, strict=True)]
    slots = []
    for seq, first, start, end, live, slot in work.items.tolist():
        assert start % tile == 0 and end - start <= split
        assert live <= end or end == start
        count[seq][first : first + block_q, max(start, live) : end] += 1
        slots += [slot] if slot >= 0 else []
    for (q, context), pairs in zip(lengths, count, strict=True):
        for token in range(q):
            low = max(0, context + token - window + 1) if window else 0
            assert (pairs[token, low : context + token + 1] == 1).all()
            assert (pairs[token] <= 1).all()
    assert sorted(slots) == list(range(work.num_partials))
    merged = [slot for _, _, first, parts in work.merges.tolist() for slot in range(first, first + parts)]
    assert merged == sorted(slots)


def test_a_split_must_hold_whole_tiles() -> None:
    with pytest.raises(ValueError, match="split_size 100 is no multiple of the tile 64"):
        plan_attention([1], [1], [0], block_q=1, tile=64, split_size=100, window=None)


def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    """As torch does, ties, infinities and NaN included; the interpreter alone would cut off."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, float("inf"), -float("inf"), float("nan"), 0.0])
    both = torch.cat([values, ties])
    rounded = torch.from_numpy(round_to_bfloat16(both.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(rounded[~both.isnan()], both.bfloat16()[~both.isnan()])
    assert rounded[both.isnan()].isnan().all()
