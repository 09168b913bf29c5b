"""merge_states against float64: attention over some keys and over others is attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_ops import DEVICE, DTYPES, FORMS, assert_rounded, computed_by, name_of, states

INF = float("inf")


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores float64 [T, H, n] (natural logarithms), values float64 [n, H, D] → out, base-2 lse. n may be 0."""
    if not scores.shape[-1]:
        return torch.full((*scores.shape[:2], values.shape[-1]), float("nan")).double(), torch.full(
            scores.shape[:2], -INF
        )
    out = torch.einsum("thn,nhd->thd", torch.softmax(scores, dim=-1), values)
    return out, torch.logsumexp(scores, dim=-1) / math.log(2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (1, 80), (5, 16), (2, 256)])
@pytest.mark.parametrize("spread", [1.0, 60.0], ids=["near", "far"])
def test_two_states_are_the_attention_over_both(
    form: str, dtype: torch.dtype, heads: int, head_dim: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    scores = spread * torch.randn((7, heads, 30), generator=generator, dtype=torch.float64)
    values = torch.randn((30, heads, head_dim), generator=generator, dtype=torch.float64)
    exact_out, exact_lse = attend(scores, values)
    (out_a, lse_a), (out_b, lse_b) = attend(scores[..., :13], values[:13]), attend(scores[..., 13:], values[13:])
    wide = torch.full((7, heads + 2, head_dim + 8), float("nan"), device=DEVICE)  # strided, as cut from a larger buffer
    wide[:, 1 : heads + 1, :head_dim] = out_b.float()
    with computed_by(form, states):
        out, lse = states.merge_states(
            out_a.float().to(DEVICE), lse_a.float().to(DEVICE),
            wide[:, 1 : heads + 1, :head_dim], lse_b.float().to(DEVICE),
            out=torch.full((7, heads, head_dim), float("nan"), dtype=dtype, device=DEVICE),
        )  # fmt: skip
    # the error of a logarithm near `spread` is what the weights, and so the result, inherit
    assert_rounded(out, exact_out, sums=8e-6 * spread)
    assert_rounded(lse, exact_lse, sums=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_state_without_keys_changes_no_bit_and_two_of_them_give_nothing(form: str, dtype: torch.dtype) -> None:
    """What such a state holds is not looked at: it is NaN here."""
    out = torch.randn((4, 2, 48)).to(dtype).to(DEVICE)
    lse = torch.tensor([[0.0, -500.0], [500.0, -INF], [3.0, -INF], [1e-30, 88.0]], device=DEVICE)
    out[1, 1] = out[2, 1] = float("nan")
    empty, nothing = torch.full_like(out, float("nan")), torch.full_like(lse, -INF)
    expected = torch.where((lse > -INF)[..., None], out, 0.0)
    for a in ((out, lse, empty, nothing), (empty, nothing, out, lse)):
        with computed_by(form, states):
            merged, merged_lse = states.merge_states(*a)
        assert torch.equal(merged, expected.to(dtype))
        assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_two_states_changes_no_bit(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn((9, 3, 40), generator=generator).to(DEVICE) for _ in range(2))
    lse_a, lse_b = (3 * torch.randn((9, 3), generator=generator).to(DEVICE) for _ in range(2))
    lse_b[0] = lse_a[0]
    with computed_by(form, states):
        forth, back = states.merge_states(a, lse_a, b, lse_b), states.merge_states(b, lse_b, a, lse_a)
    assert torch.equal(forth[0], back[0]) and torch.equal(forth[1], back[1])


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_chunks_merged_in_place(form: str) -> None:
    """A long context in chunks: the running state is input and output of each merge."""
    generator = torch.Generator().manual_seed(2)
    scores = 3 * torch.randn((5, 2, 40), generator=generator, dtype=torch.float64)
    values = torch.randn((40, 2, 32), generator=generator, dtype=torch.float64)
    out = torch.full((5, 2, 32), float("nan"), device=DEVICE)
    lse = torch.full((5, 2), -INF, device=DEVICE)
    for start, end in ((0, 1), (1, 1), (1, 17), (17, 40)):
        part, part_lse = attend(scores[..., start:end], values[start:end])
        with computed_by(form, states):
            states.merge_states(out, lse, part.float().to(DEVICE), part_lse.float().to(DEVICE), out=out, lse=lse)
    exact_out, exact_lse = attend(scores, values)
    assert_rounded(out, exact_out)
    assert_rounded(lse, exact_lse)


def test_what_does_not_fit_is_refused_by_name() -> None:
    out, lse = torch.zeros((2, 3, 8), device=DEVICE), torch.zeros((2, 3), device=DEVICE)
    with pytest.raises(ValueError, match=r"out_b must be \[T, H, D\] like out_a"):
        states.merge_states(out, lse, out[:1], lse)
    with pytest.raises(ValueError, match=r"out_a must be .* with contiguous D"):
        states.merge_states(out.mT.contiguous().mT, lse, out, lse)
    with pytest.raises(ValueError, match=r"lse_b must be contiguous float32 \(2, 3\)"):
        states.merge_states(out, lse, out, lse.double())
    with pytest.raises(ValueError, match="different devices: out_a on"):
        states.merge_states(out, lse, out.to("meta"), lse)


def test_no_tokens_at_all() -> None:
    out, lse = torch.zeros((0, 3, 8), device=DEVICE), torch.zeros((0, 3), device=DEVICE)
    merged, merged_lse = states.merge_states(out, lse, out, lse)
    assert merged.shape == out.shape and merged_lse.shape == lse.shape
