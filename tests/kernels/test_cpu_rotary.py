"""Norm, rotation and cache write of the cpu backend in one pass: right in float64, and what the steps leave."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from paged_world import TOLERANCES, bits, poisoned
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from worker.layers.cpu_ops import CpuOps

HEADS, KV_HEADS, BLOCK, POSITIONS, EPS = 5, 2, 8, 50, 1e-5


class Step(NamedTuple):
    qkv: Tensor
    positions: Tensor
    table: Tensor
    slots: Tensor
    norms: dict  # q_norm, k_norm and eps, or nothing

    def run(self, backend: CpuBackend) -> tuple[Tensor, Tensor, Tensor]:
        """(the rows afterwards, both caches), of copies; what is not written stays NaN."""
        head_dim = self.table.shape[1]
        qkv, *caches = self.qkv.clone(), *(poisoned((9, KV_HEADS, BLOCK, head_dim), self.qkv.dtype) for _ in range(2))
        backend.rotate_and_write_kv(qkv, HEADS, self.positions, self.table, *caches, self.slots, **self.norms)
        return qkv, caches[0], caches[1]

    def of(self, token: int) -> Step:
        one = slice(token, token + 1)
        return self._replace(qkv=self.qkv[one], positions=self.positions[one], slots=self.slots[one])


def make_step(dtype: torch.dtype, head_dim: int, *, norms: bool = False, num_tokens: int = 40) -> Step:
    """Every third row of a wider buffer; the last token is padding; some positions lie beyond the table."""
    qkv = torch.randn((3 * num_tokens, (HEADS + 2 * KV_HEADS) * head_dim)).to(dtype)[::3]
    angles = torch.rand((POSITIONS, head_dim // 2)) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = torch.randperm(8 * BLOCK)[:num_tokens] + BLOCK
    slots[-1] = -1
    weights = {"q_norm": torch.rand(head_dim) + 0.5, "k_norm": torch.rand(head_dim) + 0.5, "eps": EPS} if norms else {}
    return Step(qkv, torch.randint(0, POSITIONS + 3, (num_tokens,)), table, slots, weights)


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(num_threads=1)


def turned(step: Step, heads: Tensor, weight: Tensor | None) -> Tensor:
    """heads dtype [T, n, D] → float64."""
    wide = heads.double()
    if weight is not None:
        wide = wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()
    cos, sin = step.table[step.positions.clamp(max=POSITIONS - 1)].double().unsqueeze(1).chunk(2, dim=-1)
    left, right = wide.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("head_dim", [16, 48, 64])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_against_float64(cpu: CpuBackend, dtype: torch.dtype, head_dim: int, norms: bool) -> None:
    step = make_step(dtype, head_dim, norms=norms)
    qkv, k_cache, v_cache = step.run(cpu)
    before = step.qkv.unflatten(1, (-1, head_dim))
    absolute, relative, _ = TOLERANCES[dtype]
    q = qkv.unflatten(1, (-1, head_dim))[:, :HEADS]
    expected = turned(step, before[:, :HEADS], step.norms.get("q_norm"))
    torch.testing.assert_close(q.double(), expected, atol=absolute, rtol=relative)
    assert torch.equal(bits(qkv[:, HEADS * head_dim :]), bits(step.qkv[:, HEADS * head_dim :]))  # K and V stay
    live = step.slots[:-1]
    k = k_cache[live // BLOCK, :, live % BLOCK]
    expected = turned(step, before[:, HEADS:-KV_HEADS], step.norms.get("k_norm"))[:-1]
    torch.testing.assert_close(k.double(), expected, atol=absolute, rtol=relative)
    assert torch.equal(bits(v_cache[live // BLOCK, :, live % BLOCK]), bits(before[:-1, -KV_HEADS:]))
    for cache in (k_cache, v_cache):
        cache[live // BLOCK, :, live % BLOCK] = float("nan")
        assert cache.isnan().all()  # and nothing else was written


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_a_row_alone_has_the_same_bits(cpu: CpuBackend, norms: bool) -> None:
    step = make_step(torch.bfloat16, 64, norms=norms)
    together = step.run(cpu)
    for token in (0, 7, 38):
        alone = step.of(token).run(cpu)
        slot = int(step.slots[token])
        assert torch.equal(bits(alone[0][0]), bits(together[0][token]))
        for one, all_ in zip(alone[1:], together[1:], strict=True):
            assert torch.equal(bits(one[slot // BLOCK, :, slot % BLOCK]), bits(all_[slot // BLOCK, :, slot % BLOCK]))


def test_without_norms_it_leaves_what_rotation_and_write_leave(cpu: CpuBackend) -> None:
    """To a unit in the last place of float32, hence with few exceptions to the bit of bfloat16."""
    step = make_step(torch.bfloat16, 64)
    qkv, k_cache, _ = step.run(cpu)
    rows = step.qkv.clone(memory_format=torch.contiguous_format)
    CpuOps(torch.bfloat16).rotate(rows, HEADS + KV_HEADS, step.positions, step.table)
    heads = rows.unflatten(1, (-1, 64))
    caches = [poisoned((9, KV_HEADS, BLOCK, 64), torch.bfloat16) for _ in range(2)]
    cpu.write_kv(heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:], *caches, step.slots)
    differing = (bits(qkv[:, : 64 * HEADS]) != bits(rows[:, : 64 * HEADS])).sum()
    differing += (bits(k_cache) != bits(caches[0])).sum()
    assert differing <= 3


def test_what_it_cannot_address_is_refused(cpu: CpuBackend) -> None:
    step = make_step(torch.float32, 32)
    for slot in (9 * BLOCK, -2):
        step.slots[5] = slot
        with pytest.raises(ValueError, match=f"token 5 has slot {slot}; the cache has 72"):
            step.run(cpu)
    step.slots[5] = -1
    step.run(cpu)
    for changed, message in (
        (step._replace(qkv=step.qkv[:, :-1]), "qkv must be"),
        (step._replace(positions=step.positions[:9]), "positions must be"),
        (step._replace(slots=step.slots.int()), "slot_mapping must be"),
        (step._replace(table=step.table[:0]), "table of angles is empty"),
        (step._replace(norms={"q_norm": torch.ones(32)}), "together or not at all"),
    ):
        with pytest.raises(ValueError, match=message):
            changed.run(cpu)
