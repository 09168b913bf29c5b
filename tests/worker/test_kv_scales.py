"""A quantised KV cache in the worker: its scales fit the model, it takes half the memory, and the logits stay near."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS
from kernels.torch_backend import TorchBackend
from protocol.config import EngineConfig
from protocol.model_config import ModelConfig
from tests.tiny_model import VOCAB_SIZE, tiny_model
from worker.kv_scales import HEADROOM, find_scales
from worker.models import build_model
from worker.models.llama import LlamaModel
from worker.runner import ModelRunner
from worker.weights import open_weights


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    folder = tiny_model("llama")
    return build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.float32, "cpu")


def run(model: LlamaModel, kv_dtype: torch.dtype | None, scales: list | None) -> tuple[Tensor, list]:
    """Logits float32 [T, V] of 100 tokens, decoded in two steps, and the caches."""
    config = model.config
    tokens = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(5))
    caches = []
    for layer in range(config.num_layers):
        shape = (8, config.num_kv_heads, 16, config.head_dim)
        kv = tuple(torch.zeros(shape).to(kv_dtype or torch.float32) for _ in range(2))
        caches.append(kv + (scales[layer] if scales else ()))
    logits = []
    for begin, end in ((0, 60), (60, 100)):
        metadata = AttentionMetadata.build([end - begin], [end], [[7, 6, 5, 4, 3, 2, 1]], 16)
        hidden = model.forward(
            tokens[begin:end], torch.arange(begin, end), caches, [metadata] * config.num_layers, TorchBackend()
        )
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits), caches


@pytest.mark.parametrize(("kv_dtype", "error"), [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.07)])
def test_logits_stay_near_those_of_an_unquantised_cache(model: LlamaModel, kv_dtype: torch.dtype, error: float) -> None:
    """error: root mean square, as a share of the logits'. Scales that do not fit give several times as much."""
    exact, _ = run(model, None, None)
    scales = find_scales(model, kv_dtype, 256)

    def distance(scales: list) -> float:
        logits, _ = run(model, kv_dtype, scales)
        return ((logits - exact).square().mean() / exact.square().mean()).sqrt().item()

    assert distance(scales) < error
    assert distance([(k / 300, v / 300) for k, v in scales]) > 3 * error  # nearly all is clamped


def test_the_scales_reach_what_was_seen_and_a_little_more(model: LlamaModel) -> None:
    scales = find_scales(model, torch.int8, 256)
    _, caches = run(model, None, None)
    assert len(scales) == model.config.num_layers
    for layer_scales, layer_caches in zip(scales, caches, strict=True):
        for scale, cache in zip(layer_scales, layer_caches, strict=True):
            assert scale.shape == (model.config.num_kv_heads,) and scale.dtype == torch.float32
            reach, seen = scale * LIMITS[torch.int8], cache.abs().amax(dim=(0, 2, 3))
            assert (reach > seen * 0.8).all() and (reach < seen * HEADROOM * 1.5).all()


def test_every_worker_finds_the_same_scales(model: LlamaModel) -> None:
    first, second = (find_scales(model, torch.int8, 256) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_a_worker_holds_twice_the_blocks_and_says_which_backend_can() -> None:
    blocks = {}
    for kv_cache_dtype in ("auto", "fp8_e4m3", "int8"):
        runner = ModelRunner(
            EngineConfig(
                model=str(tiny_model("llama")), kv_cache_dtype=kv_cache_dtype, kv_memory="1MiB", max_model_len=128,
                max_num_batched_tokens=64, device="cpu",
            ),
            num_threads=1,
        )  # fmt: skip
        runner.warm_up()
        blocks[kv_cache_dtype] = runner.cache.num_blocks
        assert runner.backend.name == ("cpu" if kv_cache_dtype == "auto" else "torch")
    assert blocks["int8"] == blocks["fp8_e4m3"] == 2 * blocks["auto"]
    assert "not cpu: has no int8 cache" in runner.selection.reason
