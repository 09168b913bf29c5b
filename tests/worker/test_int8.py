"""8-bit layers against the formula in float64, and their promise: a row's bits depend on the row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.model_config import ModelConfig
from tests.tiny_model import write_tiny_model
from worker.layers.cpu_linear import CpuLinear, quantise_weight
from worker.layers.head import OutputHead
from worker.layers.quantization import QuantizationUnavailable, make_linear
from worker.models import build_model
from worker.weights import open_weights

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised_rows(linear: CpuLinear, x: Tensor) -> Tensor:
    """What the layer made of x in its last call, uint8 [rows, in]."""
    padded = x.shape[1] + -x.shape[1] % 4
    return linear.team.memory("rows", torch.uint8, len(x) * padded).view(len(x), padded)[:, : x.shape[1]]


def int8_layer(weight: Tensor, bias: Tensor | None = None, *, two_terms: bool = False) -> CpuLinear:
    return CpuLinear(weight, bias, quantization="int8", two_terms=two_terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(72, 40), (1, 1), (33, 7), (64, 256)])
def test_it_is_the_formula(dtype: torch.dtype, bias: bool, outputs: int, inputs: int) -> None:
    weight, b = random(outputs, inputs, dtype=dtype), random(outputs, seed=1, dtype=dtype) if bias else None
    linear, (quantised, scales) = int8_layer(weight, b), quantise_weight(weight)
    for rows in (1, 2, 15, 16, 17, 64):
        x = random(rows, inputs, seed=rows, dtype=dtype)
        result = linear(x)
        row_scales = x.double().abs().amax(dim=1, keepdim=True) / 127
        steps = quantised_rows(linear, x).double() - 128
        assert ((steps - x.double() / row_scales).abs() <= 0.5 + 1e-4).all() and steps.abs().max() == 127
        expected = (steps @ quantised.double().T) * row_scales * scales.double()
        expected += 0 if b is None else b.double()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
        assert result.dtype is dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_two_terms_leave_the_rounding_of_the_weights_alone(dtype: torch.dtype, bias: bool) -> None:
    weight, b = random(72, 40, dtype=dtype), random(72, seed=1, dtype=dtype) if bias else None
    linear, (quantised, scales) = int8_layer(weight, b, two_terms=True), quantise_weight(weight)
    for rows in (1, 3, 64):
        x = random(rows, 40, seed=rows, dtype=dtype)
        x[:, 7] = 100  # an outlier takes the whole range of the first term
        expected = x.double() @ (quantised.double() * scales.double()[:, None]).T
        expected += 0 if b is None else b.double()
        step = 100 / 127 / 254
        tolerance = {torch.float32: 0, torch.bfloat16: 2**-8}[dtype]
        bound = step * 0.51 * 40 * float(weight.abs().max())
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=bound)
        assert torch.equal(linear(x)[-1:], linear(x[-1:].clone()))


def test_it_is_close_to_the_product() -> None:
    weight, x = random(64, 512), random(32, 512, seed=1)
    expected = x.double() @ weight.double().T
    error = (int8_layer(weight)(x).double() - expected).norm() / expected.norm()
    assert error < 0.015, "two roundings to 1/127 of the greatest of 512 normal values: about 1%"


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 80), row=st.integers(0, 79), seed=st.integers(0, 9), dtype=st.sampled_from(DTYPES))
def test_a_row_has_the_same_bits_in_every_batch(rows: int, row: int, seed: int, dtype: torch.dtype) -> None:
    linear = int8_layer(random(96, 64))
    batch = random(rows, 64, seed=seed, dtype=dtype)
    row %= rows
    assert torch.equal(linear(batch)[row : row + 1], linear(batch[row : row + 1].clone()))


def test_zeros_and_no_rows() -> None:
    weight = random(8, 4)
    weight[3] = 0
    linear = int8_layer(weight, torch.arange(8.0))
    assert linear(torch.zeros(2, 4)).tolist() == [[0.0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert linear(random(2, 4))[:, 3].tolist() == [3.0, 3.0]
    assert linear(torch.zeros(0, 4)).shape == (0, 8)


def test_a_nan_stays_in_its_row() -> None:
    linear, x = int8_layer(random(8, 16)), random(3, 16)
    whole = linear(x)
    x[1, 5] = float("nan")
    result = linear(x)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], whole[[0, 2]])


def test_strided_rows_are_read_rightly() -> None:
    linear, x = int8_layer(random(8, 16)), random(4, 32)
    assert torch.equal(linear(x[:, :16]), linear(x[:, :16].clone()))


def test_weights_use_the_whole_range() -> None:
    quantised, scales = quantise_weight(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    assert quantised.tolist() == [[64, -127], [0, 0]]
    assert scales.tolist() == pytest.approx([2 / 127, 0])


def test_the_greatest_logits_are_exact() -> None:
    weight, hidden = random(500, 64, dtype=torch.bfloat16), random(3, 64, seed=1, dtype=torch.bfloat16)
    logits = OutputHead(weight, quantization="int8")(hidden)
    exact = hidden.float() @ weight.float().T
    best = exact.argmax(dim=1)
    assert torch.equal(logits.argmax(dim=1), best)
    torch.testing.assert_close(logits.gather(1, best[:, None]), exact.gather(1, best[:, None]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "dtype", "named"), [("cpu", torch.float16, "float16"), ("cuda", None, "cuda")])
def test_where_it_is_not_to_be_had_the_reason_is_named(
    tmp_path: Path, device: str, dtype: torch.dtype | None, named: str
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(QuantizationUnavailable, match=named):
        build_model(
            ModelConfig.from_folder(folder),
            open_weights(folder),
            dtype or torch.bfloat16,
            device,
            quantization="int8",
        )


def test_no_quantization_is_the_plain_layer() -> None:
    plain, quantised = make_linear(random(4, 4)), make_linear(random(4, 4), quantization="int8")
    assert isinstance(plain, CpuLinear) and isinstance(quantised, CpuLinear)
    assert (plain.weight.dtype, quantised.weight.dtype) == (torch.float32, torch.int8)
