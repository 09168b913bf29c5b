"""The small operations between matrix products: compiled against plain, plain against float64."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from protocol.model_config import ModelConfig
from tests.tiny_model import tiny_model
from worker.layers.cpu_ops import CpuOps
from worker.layers.ops import Ops, TorchOps, make_ops
from worker.layers.rope import rope_frequencies, rope_table

Make = Callable[[torch.dtype], Ops]
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # dtype → relative tolerance: one rounding


@pytest.fixture(params=["torch", "cpu"])
def make(request: pytest.FixtureRequest) -> Make:
    return {"torch": TorchOps, "cpu": CpuOps}[request.param]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
def test_add_norm_adds_in_place_and_normalises(make: Make, dtype: torch.dtype, rows: int) -> None:
    ops: Ops = make(dtype)
    residual, x, weight = random(rows, 70), random(rows, 70, seed=1, dtype=dtype), random(70, seed=2)
    total = residual + x.float()
    out = ops.add_norm(residual, x, weight, 1e-5)
    assert out.dtype is dtype
    torch.testing.assert_close(residual, total, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.double(), rms_norm(total, weight, 1e-5), atol=1e-6, rtol=DTYPES[dtype])
    alone = ops.add_norm(residual, None, weight, 1e-5)
    torch.testing.assert_close(alone.double(), rms_norm(total, weight, 1e-5), atol=1e-6, rtol=DTYPES[dtype])
    torch.testing.assert_close(residual, total, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_touches_no_other_head(make: Make, dtype: torch.dtype) -> None:
    rows, weight = random(5, 6 * 16, dtype=dtype), random(16, seed=1)
    before = rows.clone().view(5, 6, 16)
    make(dtype).norm_heads(rows, 1, 3, weight, 1e-6)
    after = rows.view(5, 6, 16)
    assert torch.equal(after[:, [0, 4, 5]], before[:, [0, 4, 5]])
    expected = rms_norm(before[:, 1:4], weight, 1e-6)
    torch.testing.assert_close(after[:, 1:4].double(), expected, atol=1e-6, rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_turns_pairs_half_a_head_apart(make: Make, dtype: torch.dtype) -> None:
    config = ModelConfig.from_folder(tiny_model("llama"))
    table = rope_table(config, 100, "cpu")
    rows, positions = random(4, 5 * 16, dtype=dtype), torch.tensor([0, 1, 50, 99])
    before = rows.double().view(4, 5, 16)
    make(dtype).rotate(rows, 3, positions, table)
    after = rows.double().view(4, 5, 16)
    assert torch.equal(after[:, 3:], before[:, 3:])
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(before[:, :3, :8], before[:, :3, 8:]) * turned
    expected = torch.cat([pairs.real, pairs.imag], dim=-1)
    torch.testing.assert_close(
        after[:, :3], expected, atol=2e-5 if dtype is torch.float32 else 1e-5, rtol=DTYPES[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_over_the_whole_range(make: Make, dtype: torch.dtype) -> None:
    gate = torch.cat([torch.linspace(-200, 200, 401), torch.tensor([0.0, -0.0, 1e-30])]).to(dtype)
    up = random(len(gate), dtype=dtype)
    out = make(dtype).silu_and_mul(torch.cat([gate, up])[None])[0]
    expected = functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-7, rtol=DTYPES[dtype])


def test_nan_stays_nan(make: Make) -> None:
    """Bits that rounding to bfloat16 would carry into infinity or zero."""
    ops: Ops = make(torch.bfloat16)
    bad = torch.from_numpy(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32))
    out = ops.add_norm(bad[:, None].repeat(1, 8), None, torch.ones(8), 1e-5)
    assert out.isnan().all()


def test_compiled_operations_serve_cpu_floats_only() -> None:
    assert isinstance(make_ops(torch.bfloat16, "cpu"), CpuOps)
    assert isinstance(make_ops(torch.float32, "cpu"), CpuOps)
    assert isinstance(make_ops(torch.float16, "cpu"), TorchOps)
    assert not isinstance(make_ops(torch.bfloat16, "cuda"), CpuOps)


def test_unknown_rope_scaling_is_refused_by_name() -> None:
    config = msgspec.structs.replace(ModelConfig.from_folder(tiny_model("llama")), rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ValueError, match="'yarn'"):
        rope_frequencies(config)
