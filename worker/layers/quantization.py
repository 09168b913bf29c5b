"""Which kinds of quantised layers a device has, and one made from a weight. Loads them only when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.layers.linear import Linear

if TYPE_CHECKING:
    from worker.layers.int8_linear import Int8Linear


class QuantizationUnavailable(RuntimeError):
    """This build of torch, this device or this dtype has no such layers; the message says which."""


def why_unavailable(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """What stands against int8 layers on this device, with activations of this dtype; None: nothing."""
    if torch.device(device).type != "cpu":
        return f"--quantization int8 runs on the CPU, not on {device}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"--quantization int8 needs --dtype bfloat16 or float32, not {dtype}".replace("torch.", "")
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")):
        return f"torch {torch.__version__} has no oneDNN operators for 8-bit layers"
    return None


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    quantization: str = "none",
    sensitive: bool = False,
    widen: bool = False,
) -> Linear | Int8Linear:
    """The layer of weight [out, in] and bias [out] for `quantization` "none" or "int8".

    sensitive: its inputs have outliers, and what is lost of the others shows in the model's answers (`two_terms` of
    `int8_linear.Int8Linear`). widen: see `linear.Linear`.
    """
    if quantization == "none":
        return Linear(weight, bias, widen=widen)
    from worker.layers.int8_linear import Int8Linear

    return Int8Linear(weight, bias, two_terms=sensitive)
