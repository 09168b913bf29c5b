"""Which kinds of layers a device has, and one made from a weight. Loads them only when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.layers.linear import Gated, Linear, LinearLayer
from worker.layers.ops import Ops

if TYPE_CHECKING:
    from kernels.cpu.team import Team


class QuantizationUnavailable(RuntimeError):
    """This device or this dtype has no such layers; the message says which."""


def has_cpu_layers(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether `cpu_linear` is what computes layers of this dtype on this device."""
    return torch.device(device).type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def why_unavailable(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """What stands against int8 layers on this device, for weights of this dtype; None: nothing."""
    if torch.device(device).type != "cpu":
        return f"--quantization int8 runs on the CPU, not on {device}"
    if not has_cpu_layers(device, dtype):
        return f"--quantization int8 needs --dtype bfloat16 or float32, not {dtype}".replace("torch.", "")
    return None


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    quantization: str = "none",
    sensitive: bool = False,
    team: Team | None = None,
    out_dtype: torch.dtype | None = None,
    keep_out: bool = True,
) -> LinearLayer:
    """The layer of weight [out, in] and bias [out] for `quantization` "none" or "int8". Raises QuantizationUnavailable.

    sensitive: its inputs have outliers, and what is lost of the others shows in the model's answers (`two_terms` of
    `cpu_linear.CpuLinear`). team, out_dtype, keep_out: see there; without effect elsewhere.
    """
    _check(weight, quantization)
    if not has_cpu_layers(weight.device, weight.dtype):
        return Linear(weight, bias)
    from worker.layers.cpu_linear import CpuLinear

    return CpuLinear(
        weight, bias, team=team, quantization=quantization, two_terms=sensitive, out_dtype=out_dtype, keep_out=keep_out
    )


def make_gated(
    weight: Tensor,
    bias: Tensor | None,
    ops: Ops,
    *,
    quantization: str = "none",
    team: Team | None = None,
    out_dtype: torch.dtype | None = None,
) -> Callable[[Tensor], Tensor]:
    """silu(x Gᵀ) · (x Uᵀ) of the stacked weight [2 · out, in], overwritten by the next call."""
    _check(weight, quantization)
    if not has_cpu_layers(weight.device, weight.dtype):
        return Gated(Linear(weight, bias), ops)
    from worker.layers.cpu_linear import CpuLinear

    return CpuLinear(
        weight, bias, team=team, quantization=quantization, out_dtype=out_dtype, gated=True, keep_out=False
    )


def chain(layers: Sequence[object]) -> None:
    """Tell layers in which order they are computed, over and over: those that can fetch their weights ahead."""
    for layer, following in zip(layers, [*layers[1:], *layers[:1]], strict=True):
        if hasattr(layer, "followed_by"):
            layer.followed_by(following)


def _check(weight: Tensor, quantization: str) -> None:
    if quantization != "none" and (reason := why_unavailable(weight.device, weight.dtype)) is not None:
        raise QuantizationUnavailable(reason)
