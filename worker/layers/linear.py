"""Linear layers as the model sees them, and the plain PyTorch form."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from worker.layers.ops import Ops


class LinearLayer(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → y [rows, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """Add y to the residual stream, float32 [rows, out], and return None; or return y for the next norm to add."""
        ...


class Linear:
    """W [out, in] and an optional b [out] of one dtype, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out], same dtype."""
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """What the next `Ops.add_norm` adds."""
        return self(x)


class Gated:
    """silu(gate) · up of a layer that computes both."""

    def __init__(self, gate_up: LinearLayer, ops: Ops) -> None:
        self.gate_up = gate_up
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out / 2]; overwritten by the next call."""
        return self.ops.silu_and_mul(self.gate_up(x))
