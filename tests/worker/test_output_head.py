"""The greatest logits are exact in float32, whatever the weights' dtype, and ties of rounding are none."""

from __future__ import annotations

import pytest
import torch

from worker.layers.head import OutputHead


@pytest.mark.parametrize("vocab", [40, 256, 1000, 6400])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_greatest_logits_are_those_of_float64(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weight = (torch.randn(vocab, 96, generator=generator) * 2).to(dtype)
    hidden = torch.randn(5, 96, generator=generator).to(dtype)
    logits = OutputHead(weight)(hidden)
    exact = hidden.double() @ weight.double().T
    assert logits.dtype is torch.float32
    assert torch.equal(logits.argmax(dim=1), exact.argmax(dim=1))
    top = exact.topk(4, dim=1)
    assert torch.allclose(logits.gather(1, top.indices).double(), top.values, atol=1e-3)


def test_logits_equal_in_bfloat16_are_told_apart() -> None:
    """25.26 and 25.36 round to the same bfloat16; the later token is the more probable one."""
    weight = torch.zeros(256, 64, dtype=torch.bfloat16)
    weight[60, :2] = torch.tensor([25.25, 0.0078125])
    weight[200, :2] = torch.tensor([25.25, 0.109375])
    hidden = torch.zeros(1, 64, dtype=torch.bfloat16)
    hidden[0, :2] = 1
    logits = OutputHead(weight)(hidden)
    assert logits[0, 60].item() == pytest.approx(25.2578125, abs=1e-6)
    assert logits[0, 200].item() == pytest.approx(25.359375, abs=1e-6)
    assert logits.argmax().item() == 200


def test_a_row_of_nan_stays_one() -> None:
    hidden = torch.ones(2, 64, dtype=torch.bfloat16)
    hidden[1] = float("nan")
    logits = OutputHead(torch.ones(128, 64, dtype=torch.bfloat16))(hidden)
    assert logits[0].isfinite().all() and logits[1].isnan().any()
