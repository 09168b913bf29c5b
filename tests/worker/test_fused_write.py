"""Rotation and cache write in one launch, where the backend has it: the model and its caches come out as from two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.metadata import AttentionMetadata
from protocol.model_config import ModelConfig
from tests.kernels.triton_ops import DEVICE
from tests.kernels.triton_ops import backend as triton
from tests.tiny_model import tiny_model
from worker.models import build_model
from worker.models.llama import LlamaModel
from worker.weights import open_weights

BLOCK = 8


class InTwo(triton.TritonBackend):
    """It has no such launch."""

    rotate_and_write_kv = None  # type: ignore[assignment]


class CpuInTwo(CpuBackend):
    rotate_and_write_kv = None  # type: ignore[assignment]


def served(
    model: LlamaModel, backend: triton.TritonBackend | CpuBackend, kv_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Hidden states and all cache elements, float32, after a prefill of two sequences and a step of one token each."""
    config = model.config
    shape = (config.num_layers, 2, 6, config.num_kv_heads, BLOCK, config.head_dim)
    pool = torch.zeros(shape, dtype=torch.int8 if kv_dtype else torch.float32, device=model.device).view(
        kv_dtype or torch.float32
    )
    scale = torch.full((config.num_kv_heads,), 0.05, device=model.device)
    caches = [(*layer, *((scale, scale) if kv_dtype else ())) for layer in pool]
    hidden = []
    for query_lens, seq_lens in (([11, 3], [11, 3]), ([1, 1], [12, 4])):
        metadata = AttentionMetadata.build(query_lens, seq_lens, [[4, 2], [5]], BLOCK, model.device)
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]).to(
            model.device
        )
        ids = (37 * positions + 5) % 256
        hidden.append(
            model.forward(ids, positions, caches, [metadata] * config.num_layers, backend).float()  # type: ignore[arg-type]
        )
    return torch.cat(hidden), pool.view(torch.int8).float() if kv_dtype else pool


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_launch_leaves_what_two_leave(kind: str, kv_dtype: torch.dtype | None) -> None:
    """qwen3 has head norms, which the launch takes in as well."""
    folder = tiny_model(kind)
    model = build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.float32, DEVICE)
    fused, split = triton.TritonBackend(), InTwo()
    with torch.inference_mode():
        (hidden, cache), (expected, expected_cache) = (served(model, backend, kv_dtype) for backend in (fused, split))
    layers = model.config.num_layers
    attended = {"paged_attention": 2 * layers, "copy_blocks": 0}
    assert fused.counters == {"rotate_and_write_kv": 2 * layers, "write_kv": 0, **attended}
    assert split.counters == {"rotate_and_write_kv": 0, "write_kv": 2 * layers, **attended}
    assert cache.count_nonzero() > 0.9 * 16 * layers * 2 * cache[0, 0, 0, :, 0].numel()
    # a number at a rounding edge of int8 may fall to its other side, and is then seen by all later layers
    torch.testing.assert_close(cache, expected_cache, atol=1.0 if kv_dtype else 1e-5, rtol=0)
    torch.testing.assert_close(hidden, expected, atol=0.05 if kv_dtype else 1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_pass_on_the_cpu_leaves_what_two_leave(kind: str) -> None:
    folder = tiny_model(kind)
    model = build_model(ModelConfig.from_folder(folder), open_weights(folder), torch.float32, "cpu")
    fused, split = CpuBackend(1), CpuInTwo(1)
    with torch.inference_mode():
        (hidden, cache), (expected, expected_cache) = (served(model, backend, None) for backend in (fused, split))
    calls = 2 * model.config.num_layers
    assert (fused.counters["rotate_and_write_kv"], fused.counters["write_kv"]) == (calls, 0)
    assert (split.counters["rotate_and_write_kv"], split.counters["write_kv"]) == (0, calls)
    torch.testing.assert_close(cache, expected_cache, atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
