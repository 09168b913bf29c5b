"""Linear layers on a CPU against float64, and their promise: a row's bits depend on the row alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.features import HAS_BF16_DOTS
from kernels.cpu.linear import BLOCK, CHUNK, PANEL
from kernels.cpu.products import DOTS, PAIRS
from kernels.cpu.team import Team
from worker.layers.cpu_linear import CpuLinear, bfloat16_form
from worker.layers.linear import Gated, Linear
from worker.layers.ops import TorchOps
from worker.layers.quantization import make_gated, make_linear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (72, 40), (33, 7), (PANEL, 64), (2 * PANEL + 1, 255)]
ROWS = [1, 2, BLOCK, BLOCK + 1, CHUNK, CHUNK + 3]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def pair() -> Team:
    return Team(2)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_it_is_the_product(outputs: int, inputs: int, dtype: torch.dtype, x_dtype: torch.dtype, pair: Team) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, seed=1, dtype=dtype)
    layer = CpuLinear(weight, bias, team=pair, out_dtype=torch.float32, form=PAIRS if dtype == torch.bfloat16 else None)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows, dtype=x_dtype)
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-5)
        residual = random(rows, outputs, seed=7)
        added = residual.clone()
        layer.add_to(added, x)
        torch.testing.assert_close(added.double(), residual.double() + expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    weight, x = random(50, 40, dtype=dtype), random(9, 40, seed=1)
    exact, rounded = CpuLinear(weight, out_dtype=torch.float32)(x), CpuLinear(weight, out_dtype=torch.bfloat16)(x)
    assert torch.equal(exact.to(torch.bfloat16), rounded)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [5, PANEL, PANEL + 9])
def test_gated_layers_are_the_gate_times_the_rest(inner: int, dtype: torch.dtype, quantization: str) -> None:
    weight, bias, x = random(2 * inner, 40, dtype=dtype), random(2 * inner, seed=1, dtype=dtype), random(11, 40, seed=2)
    both = CpuLinear(weight, bias, quantization=quantization, out_dtype=torch.float32)(x)
    gate, up = both.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    gated = CpuLinear(weight, bias, quantization=quantization, out_dtype=torch.float32, gated=True)
    torch.testing.assert_close(gated(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_gate_far_from_zero_neither_overflows_nor_hides_a_nan() -> None:
    weight = torch.tensor([[1.0], [1.0]])
    x = torch.tensor([[-1e30], [-200.0], [200.0], [float("nan")]])
    result = CpuLinear(weight, gated=True)(x)
    assert result[0].abs() < 1e30 and abs(result[1].item()) < 1e-30 and result[2].item() == 200.0**2
    assert result[3].isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    row=st.integers(0, 299),
    dtype=st.sampled_from(DTYPES),
    quantization=st.sampled_from(["none", "int8"]),
    two_terms=st.booleans(),
    gated=st.booleans(),
)
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(
    rows: int, row: int, dtype: torch.dtype, quantization: str, two_terms: bool, gated: bool
) -> None:
    weight, batch = random(2 * PANEL + 10, 66, dtype=dtype), random(rows, 66, seed=rows)
    settings = {"quantization": quantization, "two_terms": two_terms, "gated": gated}
    alone, together = CpuLinear(weight, **settings), CpuLinear(weight, team=Team(2), **settings)  # type: ignore[arg-type]
    row %= rows
    whole = alone(batch)
    assert torch.equal(whole, together(batch))
    assert torch.equal(whole[row : row + 1], alone(batch[row : row + 1]))
    assert torch.equal(whole[row:], alone(batch[row:]))


@pytest.mark.skipif(not HAS_BF16_DOTS, reason="this processor does not multiply bfloat16 pairs")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bfloat16_dots_round_the_rows_and_nothing_else(outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    layer = CpuLinear(weight, form=DOTS, out_dtype=torch.float32)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows)
        expected = x.to(torch.bfloat16).double() @ weight.double().T
        result = layer(x)
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(layer(x[-1:]), result[-1:])


def test_this_processor_has_a_faster_form() -> None:
    assert bfloat16_form() in ({PAIRS, DOTS} if HAS_BF16_DOTS else {PAIRS})


def test_no_rows_and_strided_rows() -> None:
    layer, x = CpuLinear(random(8, 16)), random(4, 32)
    assert layer(x[:0, :16]).shape == (0, 8)
    assert torch.equal(layer(x[:, :16]), layer(x[:, :16].clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    layer, x = CpuLinear(random(50, 16, dtype=dtype)), random(20, 16)
    whole = layer(x)
    x[9, 5] = float("nan")
    result = layer(x)
    assert result[9].isnan().all()
    others = [row for row in range(20) if row != 9]
    assert torch.equal(result[others], whole[others])


def test_a_process_ends_whose_helpers_still_spin() -> None:
    """A daemon thread in compiled code would bring the process down with SIGABRT."""
    script = """if True:
        import torch
        from kernels.cpu.team import Team
        from worker.layers.cpu_linear import CpuLinear
        CpuLinear(torch.ones(96, 64), team=Team(3))(torch.ones(4, 64))
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_other_dtypes_and_devices_have_the_plain_layer() -> None:
    with pytest.raises(ValueError, match="float16"):
        CpuLinear(random(8, 8, dtype=torch.float16))
    weight, x = random(8, 8, dtype=torch.float16), random(3, 8, dtype=torch.float16)
    plain, gated = make_linear(weight), make_gated(weight, None, TorchOps(torch.float16))
    assert isinstance(plain, Linear) and isinstance(gated, Gated)
    torch.testing.assert_close(plain(x), x @ weight.T, atol=1e-2, rtol=1e-2)
    residual = torch.zeros(3, 8)
    update = plain.add_to(residual, x)
    assert update is not None and torch.equal(update, plain(x)) and not residual.any()
    gate, up = (x @ weight.T).chunk(2, dim=1)
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up, atol=1e-2, rtol=1e-2)
