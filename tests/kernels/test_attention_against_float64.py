"""Every backend against the float64 reference, over the shapes that have broken paged attention elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from _pytest.mark import ParameterSet
from conftest import RUNNABLE, backends_for, marks_of
from devices import device_of
from paged_world import TOLERANCES, World, assert_close, make_queries, make_world
from torch import Tensor

from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata
from kernels.selector import AttentionShape

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True)
class Shape:
    heads: tuple[int, int]  # query heads, KV heads
    head_dim: int
    block_size: int
    window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: bool = False
    kv_dtype: torch.dtype | None = None
    sliced: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)[3:])
        defaults = (f"{f.name}={f.default}" for f in dataclasses.fields(self)[3:])
        extra = "".join(f"-{new}" for new, old in zip(changed, defaults, strict=True) if new != old)
        return f"{self.heads[0]}q{self.heads[1]}kv-d{self.head_dim}-b{self.block_size}{extra.replace('torch.', '')}"


PLAIN = [
    Shape((3, 3), 64, 16),  # no sharing
    Shape((9, 3), 64, 16),  # three query heads to a KV head
    Shape((7, 1), 80, 4),  # a group and a head size that are no powers of two
    Shape((4, 2), 96, 24),
    Shape((8, 1), 128, 32),
    Shape((2, 1), 32, 8),
    Shape((2, 1), 16, 1),  # a block for each token
    Shape((4, 1), 112, 48),
    Shape((5, 1), 192, 64),
    Shape((6, 1), 256, 128),
    Shape((24, 1), 64, 256),
    Shape((100, 1), 16, 8),  # more rows in one token than a work item has otherwise
    Shape((6, 2), 64, 16, window=1),
    Shape((6, 2), 64, 16, window=63),  # about the edge of a tile of 64 keys
    Shape((6, 2), 64, 16, window=64),
    Shape((6, 2), 64, 24, window=65),
    Shape((6, 2), 80, 4, window=7),
    Shape((4, 2), 64, 16, soft_cap=30.0),
    Shape((4, 2), 64, 24, window=17, soft_cap=2.0),
]
BEYOND = [
    Shape((6, 2), 64, 16, sinks=True),
    Shape((11, 1), 64, 64, sinks=True, window=65, soft_cap=5.0, dtype=torch.bfloat16),
    Shape((6, 2), 64, 16, causal=False),
    Shape((4, 2), 80, 64, causal=False, window=63, dtype=torch.float16),
    Shape((6, 2), 64, 8, causal=False, window=9, sinks=True, soft_cap=5.0),
    Shape((6, 2), 64, 16, kv_dtype=FLOAT8, dtype=torch.bfloat16),
    Shape((7, 1), 80, 24, kv_dtype=FLOAT8, window=20, dtype=torch.float16),
    Shape((4, 2), 128, 64, kv_dtype=FLOAT8, sinks=True, soft_cap=5.0),
    Shape((6, 2), 64, 16, kv_dtype=INT8, dtype=torch.bfloat16),
    Shape((5, 1), 96, 64, kv_dtype=INT8, causal=False, window=30, sinks=True, dtype=torch.float16),
    Shape((12, 2), 64, 128, kv_dtype=INT8, sliced=True),
    Shape((4, 2), 64, 16, sliced=True, window=65, dtype=torch.bfloat16),
]


def cases() -> Iterator[ParameterSet]:
    """Every backend that says it can, with each shape in its own dtype, and the plain ones in all or, where they take a
    thousand times longer, in one of them."""
    turns = itertools.cycle(TOLERANCES)
    for shape in PLAIN + BEYOND:
        turn = next(turns)
        asked = AttentionShape(
            "cpu", shape.dtype, shape.head_dim, shape.block_size, shape.window, shape.soft_cap, shape.causal,
            shape.sinks, shape.kv_dtype, shape.sliced,
        )  # fmt: skip
        for spec in backends_for(asked):
            dtypes = [shape.dtype]
            if shape in PLAIN:
                dtypes = [turn] if spec.name == "triton" else list(TOLERANCES)
            for dtype in dtypes:
                case = dataclasses.replace(shape, dtype=dtype)
                yield pytest.param(spec, case, id=f"{spec.name}-{case}", marks=marks_of(spec))


@functools.cache  # the reference is slow, and the same for all backends
def mixed_batch(shape: Shape) -> tuple[World, AttentionMetadata, Tensor, Tensor]:
    """The pool, the metadata, the queries and what float64 makes of them."""
    b = shape.block_size
    lengths = [  # (query tokens, tokens visible): decode, prefill, chunks, padding
        (1, 1), (0, 0), (1, b), (1, b + 1), (max(b - 1, 1), max(b - 1, 1)), (min(b, 40), b), (min(b, 40), b + 1),
        (1, 64), (1, 65), (3, 130), (35, 70), (1, 200),
    ]  # fmt: skip
    query_lens, seq_lens = [q for q, _ in lengths], [n for _, n in lengths]
    arguments = dataclasses.asdict(shape)
    world = make_world(seq_lens, **arguments)
    metadata = world.metadata(query_lens)
    q = make_queries(world, metadata.num_tokens)
    return world, metadata, q, world.expected(q, metadata)


@pytest.mark.parametrize(("backend", "shape"), list(cases()), indirect=["backend"])
def test_a_mixed_batch_equals_float64(backend: AttentionBackend, shape: Shape) -> None:
    world, metadata, q, expected = mixed_batch(shape)
    assert_close(world.attend(backend, q, metadata), expected, backend)


@pytest.mark.parametrize("shape", BEYOND, ids=str)
def test_a_backend_refuses_what_the_registry_says_it_cannot(shape: Shape) -> None:
    """The table is the only place that says so, and no backend computes something else instead."""
    asked = AttentionShape(
        "cpu", shape.dtype, shape.head_dim, shape.block_size, causal=shape.causal, sinks=shape.sinks,
        kv_dtype=shape.kv_dtype, sliced_cache=shape.sliced,
    )  # fmt: skip
    refusing = [spec for spec in RUNNABLE if spec not in backends_for(asked)]
    assert [spec.name for spec in refusing] == ["cpu"]
    world, metadata, q, _ = mixed_batch(shape)
    with pytest.raises(ValueError, match="the cpu backend"):
        world.attend(refusing[0].load(num_threads=1), q, metadata)


@pytest.mark.parametrize("score", [1.0, 1e3, 4.4e3, 1e4])
def test_soft_cap_does_not_overflow(backend: AttentionBackend, score: float) -> None:
    """Scores of +-score and 0, cap 50: at 10,000 the three weigh as 50, -50 and 0 do."""
    world = make_world([3], heads=(1, 1), head_dim=16, block_size=4, dtype=torch.float32, soft_cap=50.0)
    world.scale = 1.0
    block = world.tables[0][0]
    world.k_cache[block, 0, :3] = 0
    world.k_cache[block, 0, :3, 0] = torch.tensor([1.0, -1.0, 0.0])
    q = torch.zeros((1, 1, 16))
    q[0, 0, 0] = score
    metadata = world.metadata([1])
    out = world.attend(backend, q, metadata)
    assert_close(out, world.expected(q, metadata), backend)
    if score == 1e4:
        weights = torch.softmax(torch.tensor([50.0, -50.0, 0.0], dtype=torch.float64), 0)
        assert_close(out[0, 0], weights @ world.v_cache[block, 0, :3].double(), backend)


@pytest.mark.parametrize("score", [1e4, -1e4])
def test_equal_scores_of_any_size_weigh_equally(backend: AttentionBackend, score: float) -> None:
    world = make_world([5], heads=(1, 1), head_dim=16, block_size=4, dtype=torch.float32)
    world.scale = 1.0
    for block in world.tables[0]:
        world.k_cache[block] = 1.0 / 16
    q = torch.full((1, 1, 16), score)
    metadata = world.metadata([1])
    assert_close(world.attend(backend, q, metadata), world.expected(q, metadata), backend)


def test_a_query_that_sees_no_key_gets_zeros(backend: AttentionBackend) -> None:
    world = make_world([0, 6], heads=(2, 1), head_dim=32, block_size=4, dtype=torch.float32)
    metadata = world.metadata([3, 8], seq_lens=[0, 6])  # eight queries, six tokens: the first two stand before 0
    q = make_queries(world, 11)
    out = world.attend(backend, q, metadata)
    assert torch.equal(out[:5], torch.zeros_like(out[:5]))
    assert_close(out, world.expected(q, metadata), backend)


def test_tokens_of_no_sequence_are_left_alone(backend: AttentionBackend) -> None:
    """A padded step: q has more rows than the sequences have tokens."""
    world = make_world([9], heads=(2, 1), head_dim=32, block_size=4, dtype=torch.float32)
    metadata = world.metadata([2])
    q = make_queries(world, 5)
    out = world.attend(backend, q, metadata)
    assert not out[:2].isnan().any()
    assert out[2:].isnan().all()


def test_nan_stays_in_its_own_sequence(backend: AttentionBackend) -> None:
    """A broken row must be seen as broken, and its neighbours must not."""
    world = make_world([1, 70, 20], heads=(3, 1), head_dim=32, block_size=16, dtype=torch.float32)
    world.k_cache[world.tables[0][0], :, 0, 0] = float("nan")
    world.k_cache[world.tables[1][2], :, 3, 5] = float("nan")
    metadata = world.metadata([1, 1, 1])
    out = world.attend(backend, make_queries(world, 3), metadata)
    assert out[0].isnan().all()
    assert out[1].isnan().all()
    assert not out[2].isnan().any()


def test_block_ids_are_widened_before_they_are_multiplied(backend: AttentionBackend) -> None:
    """Blocks past 2^31 elements give the same as blocks at the front. The pool is virtual but for a few pages."""
    num_blocks, block_size, head_dim = 2**21 + 8, 16, 64
    device = device_of(backend)
    pool = torch.empty((num_blocks, 1, block_size, head_dim), dtype=torch.bfloat16, device=device)
    assert (num_blocks - 8) * block_size * head_dim == 2**31
    kv = torch.randn((20, 1, head_dim)).bfloat16().to(device)
    q = torch.randn((1, 2, head_dim)).bfloat16()
    results = []
    for table in ([1, 2], [num_blocks - 1, num_blocks - 2]):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(20)])
        backend.write_kv(kv, kv, pool, pool, slots.to(device))
        world = make_world([20], heads=(2, 1), head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)
        world.k_cache = world.v_cache = pool
        world.tables = [table]
        results.append(world.attend(backend, q, world.metadata([1])))
    assert not results[0].isnan().any()
    assert torch.equal(results[0], results[1])
