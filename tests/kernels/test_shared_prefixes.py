"""The cpu backend reads K and V of a shared prefix once, and nobody's bits show who shared it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paged_world import World, assert_close, make_queries, make_world
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.cpu.plan import SEGMENT_BYTES, WorkPlan
from kernels.metadata import AttentionMetadata

TILE = 64


class Sequence(NamedTuple):
    """Begins with the first blocks of an earlier sequence, or with none of others'."""

    model: int
    shared_tokens: int  # rounded down to whole blocks of the earlier one
    own_tokens: int
    query_len: int


# A and B share ten blocks of 16, C three of these; D shares all of A but its last block; E is a chunk on A's prefix
NESTED = [Sequence(0, 0, 200, 1), Sequence(0, 160, 9, 1), Sequence(1, 48, 100, 1), Sequence(0, 192, 1, 1)]
FAMILY = [*NESTED, Sequence(0, 160, 30, 20), Sequence(3, 190, 70, 1), Sequence(0, 0, 1, 1), Sequence(0, 64, 0, 0)]


@st.composite
def families(draw: st.DrawFn) -> list[Sequence]:
    lengths = st.one_of(st.sampled_from([0, 16, 63, 64, 65, 128, 129]), st.integers(0, 300))
    count = draw(st.integers(1, 14))
    decode = st.one_of(st.just(1), st.just(1), st.just(1), st.integers(0, 30))
    return [
        Sequence(draw(st.integers(0, max(s - 1, 0))), draw(lengths), draw(st.integers(1, 140)), draw(decode))
        for s in range(count)
    ]


def make_family(family: list[Sequence], block_size: int, **shape: object) -> tuple[World, list[int]]:
    """The sequences in one pool, and how many tokens of each are in this step. What is shared holds what is shared."""
    lengths: list[int] = []
    shared: list[int] = []
    for member in family:
        available = lengths[member.model] if lengths else 0
        shared.append(min(member.shared_tokens, available) // block_size)
        lengths.append(shared[-1] * block_size + member.own_tokens)
    world = make_world(lengths, block_size=block_size, **shape)  # type: ignore[arg-type]
    tables: list[list[int]] = []
    for member, count, own in zip(family, shared, world.tables, strict=True):
        tables.append((tables[member.model][:count] if tables else []) + own[count:])
    query_lens = [min(member.query_len, n) for member, n in zip(family, lengths, strict=True)]
    return dataclasses.replace(world, tables=tables), query_lens


# -- bits --------------------------------------------------------------------------------------------------------------

# the last three never take the form for few rows; of a group of 40, two sequences are an item
SHAPES = {
    "group 3": {"heads": (9, 3), "head_dim": 64, "block_size": 16, "dtype": torch.bfloat16},
    "group 4": {"heads": (4, 1), "head_dim": 96, "block_size": 48, "dtype": torch.bfloat16},
    "group 1": {"heads": (2, 2), "head_dim": 32, "block_size": 64, "dtype": torch.bfloat16, "soft_cap": 3.0},
    "window": {"heads": (6, 2), "head_dim": 64, "block_size": 16, "dtype": torch.bfloat16, "window": 200},
    "group 40": {"heads": (80, 2), "head_dim": 32, "block_size": 16, "dtype": torch.bfloat16},
    "float16": {"heads": (6, 2), "head_dim": 80, "block_size": 24, "dtype": torch.float16},
    "float32": {"heads": (6, 2), "head_dim": 64, "block_size": 16, "dtype": torch.float32, "soft_cap": 3.0},
}


@pytest.fixture(scope="module")
def backends() -> Iterator[list[CpuBackend]]:
    backends = [CpuBackend(num_threads=1), CpuBackend(num_threads=2)]
    yield backends
    for backend in backends:
        backend.close()


def attend(backend: CpuBackend, world: World, query_lens: list[int], queries: list[Tensor]) -> list[Tensor]:
    out = world.attend(backend, torch.cat(queries), world.metadata(query_lens))
    return list(out.split(query_lens))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(family=FAMILY)
@example(family=[Sequence(0, 128, 70, 1)] * 40)  # more than one work item holds
@given(family=families())
def test_bits_do_not_depend_on_who_shares(backends: list[CpuBackend], shape: str, family: list[Sequence]) -> None:
    world, query_lens = make_family(family, **SHAPES[shape])  # type: ignore[arg-type]
    queries = [make_queries(world, n, seed=s) for s, n in enumerate(query_lens)]
    alone = [
        attend(backends[0], world.pick([s]), query_lens[s : s + 1], queries[s : s + 1])[0] for s in range(len(family))
    ]
    for backend in backends:
        for got, expected in zip(attend(backend, world, query_lens, queries), alone, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_family_equals_float64(backends: list[CpuBackend], shape: str) -> None:
    world, query_lens = make_family(FAMILY, **SHAPES[shape])  # type: ignore[arg-type]
    metadata = world.metadata(query_lens)
    q = make_queries(world, metadata.num_tokens)
    expected = world.expected(q, metadata)
    for backend in backends:
        assert_close(world.attend(backend, q, metadata), expected, backend)


def test_a_missing_block_is_the_fault_of_who_names_it(backends: list[CpuBackend]) -> None:
    """B's table leaves the cache behind what it shares with A: A has its bits, and the error names B."""
    world, query_lens = make_family(NESTED[:2], **SHAPES["group 3"])  # type: ignore[arg-type]
    queries = [make_queries(world, 1, seed=s) for s in range(2)]
    expected = attend(backends[0], world, query_lens, queries)[0]
    metadata = world.metadata(query_lens)
    metadata.block_table[1, 10] = 10**6
    q = torch.cat(queries)
    out = torch.zeros_like(q)
    with pytest.raises(ValueError, match="sequence 1 names a block outside"):
        backends[0].paged_attention(q, world.k_cache, world.v_cache, metadata, scale=world.scale, out=out)
    assert torch.equal(out[:1], expected)


# -- the plan ----------------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    seq: int
    first: int
    count: int
    position: int
    begin: int
    end: int
    window: int


def plan_of(
    metadata: AttentionMetadata, block_size: int, *, queries_per_item: int = 32, max_threads: int = 1, window: int = 0
) -> tuple[list[list[Segment]], list[int], int]:
    """The segments of each item, the query tokens, the bad sequence or -1."""
    plan = WorkPlan()
    plan.make(metadata, block_size, queries_per_item, num_kv_heads=3, max_threads=max_threads, window=window)

    def words(address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))

    starts = words(plan.items, plan.num_items + 1)
    items = [
        [Segment(*words(at, SEGMENT_BYTES // 8)) for at in range(start, stop, SEGMENT_BYTES)]
        for start, stop in itertools.pairwise(starts)
    ]
    return items, words(plan.tokens, sum(item[0].count for item in items)), plan.bad_seq


@pytest.mark.parametrize("window", [0, 150])
@settings(max_examples=60, deadline=None)
@example(family=FAMILY, block_size=16, limits=(32, 1))
@given(
    family=families(),
    block_size=st.sampled_from([1, 16, 24, 64, 100]),
    limits=st.tuples(st.sampled_from([1, 2, 5, 32]), st.integers(1, 3)),
)
def test_every_query_meets_its_keys_once_and_in_order(
    window: int, family: list[Sequence], block_size: int, limits: tuple[int, int]
) -> None:
    world, query_lens = make_family(
        family, heads=(1, 1), head_dim=16, block_size=block_size, dtype=torch.float32, window=window or None
    )
    metadata = world.metadata(query_lens)
    items, tokens, bad_seq = plan_of(
        metadata, block_size, queries_per_item=limits[0], max_threads=limits[1], window=window
    )
    assert bad_seq == -1
    assert sorted(tokens) == list(range(sum(query_lens)))
    seq_of = [s for s, n in enumerate(query_lens) for _ in range(n)]
    position_of = [world.seq_lens[s] - n + i for s, n in enumerate(query_lens) for i in range(n)]
    for item in items:
        assert item[0].count <= limits[0]
        queries = range(item[0].first, item[0].first + item[0].count)
        for index in queries:
            seq, position = seq_of[tokens[index]], position_of[tokens[index]]
            parts = [segment for segment in item if segment.first <= index < segment.first + segment.count]
            low = max(0, position - window + 1) if window else 0
            assert parts[0].begin <= low
            assert parts[-1].end > position
            assert parts[-1].seq == seq
            assert parts[-1].position + index - parts[-1].first == position
            assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
            for segment in parts[:-1]:  # shared: whole tiles, all visible, the same blocks
                blocks = -(-segment.end // block_size)
                assert segment.end % TILE == 0
                assert segment.end <= position
                assert segment.window == 0
                assert world.tables[segment.seq][:blocks] == world.tables[seq][:blocks]


def test_what_is_shared_is_read_once() -> None:
    """A, B and C share two tiles, A and B four more."""
    tables = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 9, 10], [11]]
    lens = [7 * TILE, 6 * TILE + 1, 4 * TILE, 5]
    items, tokens, _ = plan_of(AttentionMetadata.build([1] * 4, lens, tables, TILE), TILE)
    alone, shared = items
    assert [(s.seq, s.count, s.begin // TILE, s.end) for s in shared] == [
        (0, 3, 0, 2 * TILE), (0, 2, 2, 6 * TILE), (0, 1, 6, 7 * TILE), (1, 1, 6, 6 * TILE + 1), (2, 1, 2, 4 * TILE)
    ]  # fmt: skip
    assert [(s.seq, s.count, s.begin, s.end) for s in alone] == [(3, 1, 0, 5)]
    assert tokens == [3, 0, 1, 2]


def test_a_large_group_is_cut_for_the_threads() -> None:
    tables = [[1, 2, 3 + s] for s in range(32)]
    random.Random(0).shuffle(tables)
    metadata = AttentionMetadata.build([1] * 32, [2 * TILE + 1] * 32, tables, TILE)
    assert [item[0].count for item in plan_of(metadata, TILE)[0]] == [32]
    assert [item[0].count for item in plan_of(metadata, TILE, max_threads=2)[0]] == [16, 16]
    assert [item[0].count for item in plan_of(metadata, TILE, queries_per_item=12)[0]] == [11, 11, 10]


def test_tokens_that_two_sequences_claim_are_refused() -> None:
    metadata = AttentionMetadata.build([2, 1], [2, 1], [[1], [2]], TILE)
    metadata.query_start_loc[1:] = torch.tensor([2, 1])
    assert plan_of(metadata, TILE)[2] == -1  # nothing is claimed twice: the second has no tokens
    metadata = AttentionMetadata.build([2, 0, 1], [2, 1, 1], [[1], [2], [3]], TILE)
    metadata.query_start_loc[1:] = torch.tensor([2, 1, 3])
    assert plan_of(metadata, TILE)[2] == 2
