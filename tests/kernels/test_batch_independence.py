"""The cpu backend gives a sequence the same bits alone, in any batch, in any chunks, and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_world import World, make_queries, make_world
from torch import Tensor

from kernels.cpu.backend import CpuBackend

SEQ_LENS = [150, 1, 64, 65, 0, 201, 17]


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(num_threads=1)


@pytest.fixture(scope="module")
def threaded() -> Iterator[CpuBackend]:
    backend = CpuBackend(num_threads=3)
    yield backend
    backend.close()


def queries_of(world: World) -> list[Tensor]:
    """All query tokens of each sequence."""
    return [make_queries(world, n, seed=s) for s, n in enumerate(world.seq_lens)]


def whole(backend: CpuBackend, world: World, queries: list[Tensor]) -> list[Tensor]:
    """Every sequence prefilled in one step, all in one batch."""
    out = world.attend(backend, torch.cat(queries), world.metadata(world.seq_lens))
    return list(out.split(world.seq_lens))


@pytest.fixture(params=["plain", "window", "soft cap"])
def features(request: pytest.FixtureRequest) -> dict:
    return {"plain": {}, "window": {"window": 70}, "soft cap": {"soft_cap": 3.0}}[request.param]


# dtype, heads, head_dim, block_size: the last three let few rows stream from the cache (groups of 3, 4 and 1), the
# others never do
SHAPES = {
    "float32": (torch.float32, (14, 2), 80, 24),
    "float16": (torch.float16, (14, 2), 80, 24),
    "bfloat16": (torch.bfloat16, (14, 2), 80, 24),
    "group 3": (torch.bfloat16, (9, 3), 64, 16),
    "group 4": (torch.bfloat16, (4, 1), 96, 48),
    "group 1": (torch.bfloat16, (2, 2), 32, 64),
}


@pytest.fixture(params=SHAPES)
def world(request: pytest.FixtureRequest, features: dict) -> World:
    dtype, heads, head_dim, block_size = SHAPES[request.param]
    return make_world(SEQ_LENS, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, **features)


def test_alone_equals_in_a_batch(cpu: CpuBackend, world: World) -> None:
    queries = queries_of(world)
    together = whole(cpu, world, queries)
    for s, expected in enumerate(together):
        assert torch.equal(whole(cpu, world.pick([s]), [queries[s]])[0], expected)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64])
def test_chunks_equal_one_prefill(cpu: CpuBackend, world: World, chunk: int) -> None:
    """Chunks of 1 are decode: a recomputed token equals the one that was decoded, to the bit."""
    queries = queries_of(world)
    expected = whole(cpu, world, queries)
    for begin in range(0, max(SEQ_LENS), chunk):
        query_lens = [max(0, min(chunk, n - begin)) for n in SEQ_LENS]
        seq_lens = [min(begin + chunk, n) for n in SEQ_LENS]
        parts = [q[begin : begin + count] for q, count in zip(queries, query_lens, strict=True)]
        out = world.attend(cpu, torch.cat(parts), world.metadata(query_lens, seq_lens))
        for s, got in enumerate(out.split(query_lens)):
            assert torch.equal(got, expected[s][begin : begin + query_lens[s]])


def test_threads_do_not_change_a_bit(cpu: CpuBackend, threaded: CpuBackend, world: World) -> None:
    queries = queries_of(world)
    expected = whole(cpu, world, queries)
    for _ in range(3):  # the threads race for work items, each time another way
        for got, want in zip(whole(threaded, world, queries), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("query_len", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_where_the_blocks_lie_does_not_change_a_bit(cpu: CpuBackend, dtype: torch.dtype, query_len: int) -> None:
    """The same K and V through other block ids and another block size, which may ask for another form of the kernel."""
    results = []
    for block_size in (16, 24):
        world = make_world([100], heads=(4, 2), head_dim=64, block_size=block_size, dtype=dtype)
        for p in range(100):
            generator = torch.Generator().manual_seed(p)
            for cache in (world.k_cache, world.v_cache):
                row = torch.randn((2, 64), generator=generator)
                cache[world.tables[0][p // block_size], :, p % block_size] = row.to(dtype)
        results.append(world.attend(cpu, make_queries(world, query_len), world.metadata([query_len])))
    assert torch.equal(results[0], results[1])
