"""The model against transformers on the same folder, in float32: same logits and tokens, however it is batched."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels.metadata import AttentionMetadata
from kernels.selector import select_backend
from kernels.triton.elementwise import TritonOps
from protocol.model_config import ModelConfig
from tests.tiny_model import KINDS, VOCAB_SIZE, tiny_model
from worker.models import build_model
from worker.models.llama import LlamaModel
from worker.weights import open_weights

BLOCK = 16


class PagedWorld:
    """A model with its caches; sequence i owns blocks i * 16 + 1 .. (i + 1) * 16, handed out backwards."""

    def __init__(self, model: LlamaModel, num_sequences: int, backend: str) -> None:
        config = model.config
        self.model = model
        self.backend = select_backend(
            backend, device="cpu", dtype=model.dtype, head_dim=config.head_dim, block_size=BLOCK
        ).backend
        shape = (num_sequences * 16 + 1, config.num_kv_heads, BLOCK, config.head_dim)
        self.caches = [
            (torch.full(shape, float("nan"), dtype=model.dtype), torch.full(shape, float("nan"), dtype=model.dtype))
            for _ in range(config.num_layers)
        ]
        self.tables = [list(range((i + 1) * 16, i * 16, -1)) for i in range(num_sequences)]
        self.lengths = [0] * num_sequences

    def step(self, pieces: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run the next tokens int64 [n] of some sequences together; the logits float32 [n, V] of each."""
        query_lens = [len(tokens) for tokens in pieces.values()]
        positions = [torch.arange(self.lengths[i], self.lengths[i] + len(t)) for i, t in pieces.items()]
        for i, tokens in pieces.items():
            self.lengths[i] += len(tokens)
        metadata = AttentionMetadata.build(
            query_lens, [self.lengths[i] for i in pieces], [self.tables[i] for i in pieces], BLOCK
        )
        hidden = self.model.forward(
            torch.cat(list(pieces.values())),
            torch.cat(positions),
            self.caches,
            [metadata] * self.model.config.num_layers,
            self.backend,
        )
        logits = self.model.compute_logits(hidden)
        return dict(zip(pieces, logits.split(query_lens), strict=True))


@functools.cache
def models(kind: str) -> tuple[LlamaModel, torch.nn.Module]:
    folder = tiny_model(kind)
    ours = build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.float32, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return ours, theirs.eval()


def random_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def oracle_logits(theirs: torch.nn.Module, tokens: Tensor) -> Tensor:
    return theirs(tokens[None]).logits[0].float()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_one_prefill(kind: str, backend: str) -> None:
    ours, theirs = models(kind)
    tokens = random_tokens(150, seed=1)
    logits = PagedWorld(ours, 1, backend).step({0: tokens})[0]
    torch.testing.assert_close(logits, oracle_logits(theirs, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_chunks_and_neighbours(kind: str) -> None:
    """Three sequences in chunks of changing size, prefill and decode mixed in one step, against each one alone."""
    ours, theirs = models(kind)
    sequences = {i: random_tokens(length, seed=i) for i, length in enumerate((70, 33, 17))}
    world = PagedWorld(ours, 3, "torch")
    parts: dict[int, list[Tensor]] = {i: [] for i in sequences}
    chunks = [(1, 5, 16), (16, 1, 1), (15, 17, 0), (33, 1, 0), (1, 9, 0), (4, 0, 0)]
    for sizes in chunks:
        pieces = {i: sequences[i][world.lengths[i] : world.lengths[i] + size] for i, size in enumerate(sizes) if size}
        for i, logits in world.step(pieces).items():
            parts[i].append(logits)
    for i, tokens in sequences.items():
        torch.testing.assert_close(torch.cat(parts[i]), oracle_logits(theirs, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_over_a_long_output(kind: str) -> None:
    ours, theirs = models(kind)
    prompt = random_tokens(20, seed=3)
    expected = theirs.generate(  # type: ignore[operator]
        prompt[None], max_new_tokens=200, do_sample=False, eos_token_id=None, attention_mask=torch.ones(1, 20)
    )[0]
    world = PagedWorld(ours, 1, "torch")
    tokens, piece = prompt.tolist(), prompt
    for _ in range(200):
        token = int(world.step({0: piece})[0][-1].argmax())
        tokens.append(token)
        piece = torch.tensor([token])
    assert tokens == expected.tolist()


def test_twins_of_one_step_share_blocks_written_in_it() -> None:
    """The second sequence reads the first one's blocks, filled in the same step, in every layer."""
    ours, theirs = models("llama")
    tokens = random_tokens(40, seed=5)
    world = PagedWorld(ours, 2, "torch")
    world.tables[0] = world.tables[1][:2] + world.tables[0][2:]  # the reader stands before the writer
    world.lengths[0] = 32
    logits = world.step({0: tokens[32:], 1: tokens})
    expected = oracle_logits(theirs, tokens)
    torch.testing.assert_close(logits[0], expected[32:], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], expected, atol=1e-4, rtol=0)


def test_bfloat16_stays_close_to_float32() -> None:
    folder = tiny_model("llama")
    model = build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.bfloat16, "cpu")
    tokens = random_tokens(60, seed=7)
    logits = PagedWorld(model, 1, "torch").step({0: tokens})[0]
    expected = oracle_logits(models("llama")[1], tokens)
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


def test_int32_token_ids_are_accepted_and_hidden_states_outlive_the_next_step() -> None:
    ours, _ = models("llama")
    world = PagedWorld(ours, 1, "torch")
    metadata = AttentionMetadata.build([4], [4], world.tables, BLOCK)
    arguments = (torch.arange(4), world.caches, [metadata] * 2, world.backend)
    first = ours.forward(torch.tensor([1, 2, 3, 4], dtype=torch.int32), *arguments)
    kept = first.clone()
    ours.forward(torch.tensor([9, 8, 7, 6], dtype=torch.int64), *arguments)
    assert torch.equal(first, kept)


def test_positions_of_another_type_are_refused() -> None:
    ours, _ = models("llama")
    with pytest.raises(ValueError, match="int64"):
        ours.forward(torch.tensor([1]), torch.tensor([0], dtype=torch.int32), [], [], None)  # type: ignore[arg-type]


def test_dummy_weights_are_the_same_for_the_same_seed_only() -> None:
    config = ModelConfig.from_folder(tiny_model("llama"))

    def logits(seed: int) -> Tensor:
        weights = open_weights("nowhere", load_format="dummy", seed=seed)
        model = build_model(config, weights, torch.float32, "cpu")
        return PagedWorld(model, 1, "torch").step({0: torch.tensor([1, 2, 3])})[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


@pytest.mark.parametrize("kind", ["llama-bias", "qwen3"])
def test_logits_with_the_operations_of_a_gpu(kind: str) -> None:
    """Not compiled here, but called as on a GPU, with all their checks of shapes, strides and dtypes."""
    _, theirs = models(kind)
    folder, ops = tiny_model(kind), TritonOps(torch.float32)
    ours = build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.float32, "cpu")
    ours.ops = ops
    for layer in ours.layers:
        layer.ops = ops
    tokens = random_tokens(40, seed=6)
    world = PagedWorld(ours, 1, "torch")
    logits = torch.cat([world.step({0: piece})[0] for piece in tokens.split([30, 1, 9])])
    torch.testing.assert_close(logits, oracle_logits(theirs, tokens), atol=1e-4, rtol=0)
