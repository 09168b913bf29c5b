"""Steps that are played from a recording: to the bit what their calls give one by one, whatever the batch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.backend import AttentionBackend, team_of
from kernels.cpu.backend import CpuBackend
from kernels.metadata import AttentionMetadata
from protocol.model_config import ModelConfig
from tests.tiny_model import VOCAB_SIZE, tiny_model
from worker.models import build_model
from worker.models.llama import LlamaModel
from worker.weights import open_weights

BLOCK, BLOCKS_EACH, SEQUENCES = 16, 8, 4


class OneByOne:
    """The backend without its replay."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        if name == "replay":
            raise AttributeError(name)
        return getattr(self._backend, name)


class World:
    """A model, caches, and sequences that grow; sequence i owns BLOCKS_EACH blocks."""

    def __init__(self, model: LlamaModel, backend: AttentionBackend) -> None:
        config = model.config
        self.model, self.backend = model, backend
        shape = (SEQUENCES * BLOCKS_EACH + 1, config.num_kv_heads, BLOCK, config.head_dim)
        self.caches = [
            tuple(torch.full(shape, float("nan"), dtype=model.dtype) for _ in range(2))
            for _ in range(config.num_layers)
        ]
        self.lengths = [0] * SEQUENCES

    def step(self, sizes: dict[int, int], seed: int) -> Tensor:
        """So many random tokens of some sequences; the hidden states of all of them."""
        for i, size in sizes.items():
            self.lengths[i] += size
        tables = [list(range(1 + i * BLOCKS_EACH, 1 + (i + 1) * BLOCKS_EACH)) for i in sizes]
        lengths = [self.lengths[i] for i in sizes]
        metadata = AttentionMetadata.build(list(sizes.values()), lengths, tables, BLOCK)
        return self.run(metadata, sizes, lengths, seed)

    def run(self, metadata: AttentionMetadata, sizes: dict[int, int], lengths: list[int], seed: int) -> Tensor:
        tokens = torch.randint(0, VOCAB_SIZE, (sum(sizes.values()),), generator=torch.Generator().manual_seed(seed))
        positions = [torch.arange(end - size, end) for end, size in zip(lengths, sizes.values(), strict=True)]
        layers = [metadata] * self.model.config.num_layers
        return self.model.forward(tokens, torch.cat(positions), self.caches, layers, self.backend)


@functools.cache
def parts(dtype: torch.dtype, quantization: str, threads: int, kind: str = "llama") -> tuple[LlamaModel, CpuBackend]:
    backend = CpuBackend(num_threads=threads)
    config = ModelConfig.from_folder(folder := tiny_model(kind))
    model = build_model(config, open_weights(folder), dtype, "cpu", quantization=quantization, team=team_of(backend))
    return model, backend


def worlds(dtype: torch.dtype, quantization: str, threads: int, kind: str = "llama") -> tuple[World, World]:
    """Of the same model: recorded, and one by one."""
    model, backend = parts(dtype, quantization, threads, kind)
    return World(model, backend), World(model, OneByOne(backend))  # type: ignore[arg-type]


STEPS = st.lists(st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(1, 12), min_size=1), min_size=1, max_size=8)
"""Tokens per sequence: decode, chunks and both together, growing and shrinking."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, "none"), (torch.float32, "none"), (torch.bfloat16, "int8")]
)
@settings(deadline=None)  # the first step may compile
@given(steps=STEPS)
def test_a_replay_gives_the_bits_of_its_calls(
    steps: list[dict[int, int]], dtype: torch.dtype, quantization: str, threads: int
) -> None:
    recorded, called = worlds(dtype, quantization, threads)
    for seed, sizes in enumerate(steps):
        mine, theirs = recorded.step(sizes, seed), called.step(sizes, seed)
        assert torch.equal(mine, theirs) and not mine.isnan().any()
    for (k, v), (other_k, other_v) in zip(recorded.caches, called.caches, strict=True):
        assert torch.equal(k.nan_to_num(), other_k.nan_to_num()) and torch.equal(v.nan_to_num(), other_v.nan_to_num())


@pytest.mark.parametrize("kind", ["qwen3", "llama-bias", "mistral"])
def test_other_architectures(kind: str) -> None:
    recorded, called = worlds(torch.bfloat16, "none", 1, kind)
    for seed, sizes in enumerate([{0: 30, 1: 5}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 9}, {2: 1}]):
        assert torch.equal(recorded.step(sizes, seed), called.step(sizes, seed))


def test_only_a_step_larger_than_all_before_is_recorded() -> None:
    recorded, _ = worlds(torch.bfloat16, "none", 1)
    recorded.step({0: 20}, 0)
    first = recorded.model._recorded
    recorded.step({0: 1, 1: 12}, 1)
    assert recorded.model._recorded is first
    recorded.step({1: 15, 2: 10}, 2)
    assert recorded.model._recorded is not first


def test_calls_are_counted_as_if_they_were_made() -> None:
    recorded, called = worlds(torch.bfloat16, "none", 1)
    backend = recorded.backend
    recorded.step({0: 9}, 0)
    before = dict(backend.counters)
    recorded.step({0: 1}, 1)
    replayed = {name: count - before[name] for name, count in backend.counters.items()}
    before = dict(backend.counters)
    called.step({0: 9}, 0)
    assert replayed == {name: count - before[name] for name, count in backend.counters.items()}


def test_a_block_that_the_cache_lacks_is_named_and_the_next_step_works() -> None:
    recorded, called = worlds(torch.bfloat16, "none", 1)
    for world in (recorded, called):
        world.step({0: 40}, 0)
    metadata = AttentionMetadata.build([1], [41], [[1, 2, 3]], BLOCK)
    metadata.block_table[0, 1] = 10_000
    with pytest.raises(ValueError, match="sequence 0 names a block outside of the cache's 33"):
        recorded.run(metadata, {0: 1}, [41], 1)
    assert torch.equal(recorded.step({0: 1}, 1), called.step({0: 1}, 1))
