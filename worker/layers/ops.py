"""What stands between the matrix products: norm, rotation, gate. One interface, and its plain PyTorch form.

All of it computes in float32 and rounds once, at the end. The residual stream is kept in float32, so that thirty
layers of bfloat16 sums do not wear it down.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from kernels.cpu.team import Team


class Ops(Protocol):
    """`dtype` is that of what enters matrix products; all tensors are contiguous.

    The result of add_norm or silu_and_mul may be overwritten when the same method is called again: each is the input
    of the next matrix product and of nothing else.
    """

    def add_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (float32 [T, H]; x dtype [T, H] or None), then RMSNorm(residual) * weight.

        Returns dtype [T, H].
        RMSNorm(r) = r / sqrt(mean(r²) + eps) (Zhang and Sennrich 2019). weight: float32 [H].
        """
        ...

    def norm_heads(self, rows: Tensor, first: int, count: int, weight: Tensor, eps: float) -> None:
        """RMSNorm, in place, of heads first .. first + count - 1 of rows [T, n * D], any dtype; weight: float32 [D]."""
        ...

    def rotate(self, rows: Tensor, count: int, positions: Tensor, table: Tensor) -> None:
        """Turn the first `count` heads of rows [T, n * D] of any dtype, in place, by the angles of positions int64 [T].

        table: float32 [num_positions, D] as of `rope_table`.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up dtype [T, 2I] → silu(first half) * second half, dtype [T, I] (SwiGLU, Shazeer 2020)."""
        ...


class TorchOps:
    """Any device, any dtype. Also the reference for compiled forms."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def add_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if x is not None:
            residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, eps).to(self.dtype)

    def norm_heads(self, rows: Tensor, first: int, count: int, weight: Tensor, eps: float) -> None:
        heads = _heads(rows, first, count, weight.shape[0])
        heads.copy_(functional.rms_norm(heads.float(), weight.shape, weight, eps))

    def rotate(self, rows: Tensor, count: int, positions: Tensor, table: Tensor) -> None:
        half = table.shape[1] // 2
        heads = _heads(rows, 0, count, table.shape[1])
        cos, sin = table[positions].unsqueeze(1).split(half, dim=-1)
        left, right = heads.float().split(half, dim=-1)
        heads.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)


def _heads(rows: Tensor, first: int, count: int, head_dim: int) -> Tensor:
    """The view [T, count, head_dim] of some heads of rows [T, n * head_dim]."""
    return rows[:, first * head_dim : (first + count) * head_dim].unflatten(1, (count, head_dim))


def make_ops(dtype: torch.dtype, device: torch.device | str, team: Team | None = None) -> Ops:
    """The fastest form for this dtype and device. team: of a CPU, see `CpuOps`."""
    kind = torch.device(device).type
    if kind == "cpu" and dtype in (torch.bfloat16, torch.float32):
        from worker.layers.cpu_ops import CpuOps  # loads Numba

        return CpuOps(dtype, team)
    if kind == "cuda" and importlib.util.find_spec("triton") is not None:
        from kernels.triton.elementwise import TritonOps

        return TritonOps(dtype)
    return TorchOps(dtype)
