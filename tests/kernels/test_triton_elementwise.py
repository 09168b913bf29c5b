"""Norm, rotation, gate and the fused cache write against float64, as kernels and as what stands in for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_world import bits
from torch import Tensor
from triton_ops import DEVICE, DTYPES, FORMS, assert_rounded, computed_by, elementwise, name_of

from kernels import reference
from kernels.quantise import LIMITS

EPS = 1e-5
NAN = float("nan")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with computed_by(request.param, elementwise):
        yield request.param


@pytest.fixture(params=DTYPES, ids=name_of)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def cut(values: Tensor) -> Tensor:
    """The same values as a slice of a wider buffer, NaN around it: rows are strided."""
    rows, width = values.shape
    buffer = torch.full((rows + 2, width + 24), NAN, dtype=values.dtype, device=DEVICE)
    view = buffer[1:-1, 8 : 8 + width]
    view.copy_(values)
    return view


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def angle_table(num_positions: int, head_dim: int) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)


def turned(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """heads [T, n, D] as complex numbers, times those of the table; float64."""
    half = heads.shape[-1] // 2
    factors = torch.complex(table[positions, :half].double(), table[positions, half:].double())[:, None]
    pairs = torch.complex(heads[..., :half].double(), heads[..., half:].double()) * factors
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("shape", [(5, 64), (1, 100), (3, 1), (2, 1500)], ids=str)
def test_add_norm(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    residual, x, weight = random(*shape), random(*shape, seed=1, dtype=dtype), random(shape[1], seed=2)
    total = residual.double() + x.double()
    out = elementwise.TritonOps(dtype).add_norm(residual, x, weight, EPS)
    assert out.dtype is dtype
    assert_rounded(residual, total, sums=2e-7)
    assert_rounded(out, rms_norm(total, weight))


def test_norm_without_an_addend_leaves_the_residual(form: str, dtype: torch.dtype) -> None:
    residual, weight = random(4, 96), random(96, seed=2)
    before = residual.clone()
    out = elementwise.TritonOps(dtype).add_norm(residual, None, weight, EPS)
    assert torch.equal(residual, before)
    assert_rounded(out, rms_norm(before, weight))


@pytest.mark.parametrize(("count", "head_dim"), [(3, 16), (9, 80), (1, 128)])
def test_norm_of_heads_touches_no_other_head(form: str, dtype: torch.dtype, count: int, head_dim: int) -> None:
    rows, weight = cut(random(5, (count + 2) * head_dim, dtype=dtype)), random(head_dim, seed=1)
    rows[:, :head_dim] = NAN
    before = rows.clone().unflatten(1, (-1, head_dim))
    elementwise.TritonOps(dtype).norm_heads(rows, 1, count, weight, EPS)
    after = rows.unflatten(1, (-1, head_dim))
    assert torch.equal(bits(after[:, [0, -1]]), bits(before[:, [0, -1]]))
    assert_rounded(after[:, 1:-1], rms_norm(before[:, 1:-1], weight))


@pytest.mark.parametrize(("count", "head_dim"), [(3, 16), (9, 80), (24, 6)])
def test_rotation_turns_pairs_half_a_head_apart(form: str, dtype: torch.dtype, count: int, head_dim: int) -> None:
    table, positions = angle_table(100, head_dim), torch.tensor([0, 1, 50, 99], device=DEVICE)
    rows = cut(random(4, (count + 1) * head_dim, dtype=dtype))
    before = rows.clone().unflatten(1, (-1, head_dim))
    elementwise.TritonOps(dtype).rotate(rows, count, positions, table)
    after = rows.unflatten(1, (-1, head_dim))
    assert torch.equal(bits(after[:, count:]), bits(before[:, count:]))
    assert_rounded(after[:, :count], turned(before[:, :count], positions, table), sums=1e-6)


def test_a_position_outside_of_the_table_reads_its_edge(form: str) -> None:
    table, rows = angle_table(10, 16), random(2, 16)
    expected = turned(rows.clone()[:, None], torch.tensor([0, 9], device=DEVICE), table)
    elementwise.TritonOps(torch.float32).rotate(rows, 1, torch.tensor([-5, 10**9], device=DEVICE), table)
    assert_rounded(rows[:, None], expected, sums=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as on a GPU, where nobody says so
@pytest.mark.parametrize("size", [1, 100, 1024, 1500])
def test_gate(form: str, dtype: torch.dtype, size: int) -> None:
    gate_up = cut(5 * random(3, 2 * size, dtype=dtype))
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0  # exp of it overflows, or vanishes
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = elementwise.TritonOps(dtype).silu_and_mul(gate_up)
    assert out.dtype is dtype and out.is_contiguous()
    assert_rounded(out, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "head-norms"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"), [((3, 1), 16, 16), ((10, 5), 80, 4), ((14, 2), 64, 24), ((1, 1), 128, 1)]
)
def test_rotation_and_cache_write_in_one_pass(
    form: str, dtype: torch.dtype, norms: bool, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    num_heads, num_kv_heads = heads
    num_tokens, num_blocks = 13, 30 // block_size + 2
    qkv = cut(random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype))
    before = qkv.clone()
    q, k, v = before.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    table, positions = angle_table(100, head_dim), torch.arange(40, 40 + num_tokens, device=DEVICE)
    slots = (torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size).to(DEVICE)
    slots[[0, 7, num_tokens - 1]] = -1
    caches = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), NAN, dtype=dtype, device=DEVICE)
    q_norm, k_norm = (random(head_dim, seed=seed) if norms else None for seed in (3, 4))
    elementwise.TritonOps(dtype).rotate_and_write_kv(
        qkv, num_heads, positions, table, caches[0], caches[1], slots, q_norm=q_norm, k_norm=k_norm, eps=EPS
    )
    exact_q = turned(q if q_norm is None else rms_norm(q, q_norm), positions, table)
    exact_k = turned(k if k_norm is None else rms_norm(k, k_norm), positions, table)
    after = qkv.unflatten(1, (-1, head_dim))
    assert_rounded(after[:, :num_heads], exact_q)
    assert torch.equal(qkv[:, num_heads * head_dim :], before[:, num_heads * head_dim :])
    expected = torch.full(caches.shape, NAN, dtype=torch.float64, device=DEVICE)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // block_size, :, slot % block_size] = exact_k[token]
            expected[1, slot // block_size, :, slot % block_size] = v[token].double()
    assert_rounded(caches[0], expected[0])
    torch.testing.assert_close(caches[1], expected[1].to(dtype), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", LIMITS, ids=name_of)
def test_a_quantised_cache_holds_what_writing_the_rounded_k_and_v_would_put_there(
    form: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """By the bit, clamped ends and the greatest number included; angles are 0, so that K is exact."""
    ops, head_dim, slots = elementwise.TritonOps(dtype), 48, torch.tensor([9, -1, 4, 15], device=DEVICE)
    qkv = 30 * random(4, (3 + 2 * 2) * head_dim, dtype=dtype)
    qkv[2, 3 * head_dim] = qkv[3, -1] = 3e4
    k_scale, v_scale = torch.tensor([0.25, 3.0], device=DEVICE), torch.tensor([1e-2, 1.0], device=DEVICE)
    shape = (4, 2, 4, head_dim)
    caches = [torch.zeros(shape, dtype=torch.int8, device=DEVICE).view(cache_dtype) for _ in range(4)]
    k, v = qkv.clone().unflatten(1, (-1, head_dim))[:, 3:].split(2, dim=1)
    ops.rotate_and_write_kv(
        qkv, 3, torch.zeros(4, dtype=torch.int64, device=DEVICE), angle_table(2, head_dim), caches[0], caches[1], slots,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    reference.write_kv(k, v, caches[2], caches[3], slots, k_scale, v_scale)
    assert caches[2].view(torch.int8).count_nonzero() > 250
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(actual.view(torch.int8), expected.view(torch.int8))


def test_v_is_copied_whatever_it_holds(form: str) -> None:
    """Infinities and NaN of V stay where they are: V is not turned, not even by an angle of 0."""
    qkv = random(1, 3 * 16)
    qkv[0, 32:35] = torch.tensor([float("inf"), NAN, -float("inf")])
    caches = torch.zeros((2, 2, 1, 4, 16), device=DEVICE)
    elementwise.TritonOps(torch.float32).rotate_and_write_kv(
        qkv, 1, torch.tensor([7], device=DEVICE), angle_table(10, 16), caches[0], caches[1],
        torch.tensor([5], device=DEVICE),
    )  # fmt: skip
    assert torch.equal(bits(caches[1, 1, 0, 1]), bits(qkv[0, 32:]))


def test_a_step_without_tokens_launches_nothing() -> None:
    ops, weight = elementwise.TritonOps(torch.float32), random(16)
    empty, table = torch.zeros((0, 48), device=DEVICE), angle_table(4, 16)
    positions, cache = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros((2, 1, 4, 16), device=DEVICE)
    assert ops.add_norm(empty, None, random(48), EPS).shape == (0, 48)
    assert ops.silu_and_mul(empty).shape == (0, 24)
    ops.norm_heads(empty, 0, 1, weight, EPS)
    ops.rotate(empty, 1, positions, table)
    ops.rotate_and_write_kv(empty, 1, positions, table, cache, cache, positions)


def test_what_does_not_fit_is_refused_by_name() -> None:
    ops, weight, rows = elementwise.TritonOps(torch.float32), random(16), random(2, 48)
    positions, table = torch.tensor([1, 2], device=DEVICE), angle_table(4, 16)
    cache, slots = torch.zeros((2, 1, 4, 16), device=DEVICE), torch.tensor([4, 5], device=DEVICE)
    for call, message in (
        (lambda: ops.add_norm(rows.half(), None, random(48), EPS), "residual must be contiguous float32"),
        (lambda: ops.add_norm(rows, rows.mT, random(48), EPS), r"x must be contiguous \(2, 48\)"),
        (lambda: ops.add_norm(rows, None, weight, EPS), r"weight must be contiguous float32 \[48\]"),
        (lambda: ops.add_norm(random(1, 40000), None, random(40000), EPS), "at most 16384 elements, not 40000"),
        (lambda: ops.norm_heads(rows, 2, 2, weight, EPS), r"at least 4 \* 16"),
        (lambda: ops.norm_heads(rows, 0, 3, random(15), EPS), "head_dim 15 has no two halves"),
        (lambda: ops.rotate(rows, 1, positions.int(), table), r"positions must be contiguous int64 \[2\]"),
        (lambda: ops.rotate(rows, 1, positions, table.double()), "table of angles must be contiguous float32"),
        (lambda: ops.silu_and_mul(rows[:, :47]), r"gate_up must be \[T, 2I\]"),
        (lambda: ops.rotate_and_write_kv(rows, 2, positions, table, cache, cache, slots), "qkv must be"),
        (lambda: ops.rotate_and_write_kv(rows, 1, positions, table, cache, cache, slots[:1]), "slots must be"),
        (
            lambda: ops.rotate_and_write_kv(rows, 1, positions, table, cache, cache, slots, q_norm=weight),
            "together or not at all",
        ),
        (
            lambda: ops.rotate_and_write_kv(rows, 1, positions, angle_table(4, 8), cache, cache, slots),
            "for head_dim 8, the caches for 16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
