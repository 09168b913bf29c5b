"""Weights in the order in which `products` reads them: [panels, steps, outputs of a panel, k of a step]."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.linear import PANEL
from kernels.cpu.memory import Arena
from kernels.cpu.products import BYTES, DOTS, PAIRS, SINGLE

DEPTH_OF_STEP = {SINGLE: 1, PAIRS: 2, DOTS: 2, BYTES: 4}
"""k that one vector of packed weights holds of 16 outputs."""

_PACKED = Arena()  # layers are packed in the order in which a step reads them

_DTYPES = {SINGLE: torch.float32, PAIRS: torch.bfloat16, DOTS: torch.bfloat16, BYTES: torch.int8}


def pack(weight: Tensor, form: int) -> Tensor:
    """weight [out, in] of the form's dtype (float32, bfloat16, bfloat16, int8) → flat, padded with zeros."""
    if weight.dtype is not _DTYPES[form]:
        raise ValueError(f"weights of this form are {_DTYPES[form]}, not {weight.dtype}")
    depth = DEPTH_OF_STEP[form]
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % depth, 0, -weight.shape[0] % PANEL))
    panels, steps = padded.shape[0] // PANEL, padded.shape[1] // depth
    packed = _PACKED.empty((panels, steps, PANEL, depth), weight.dtype)
    packed.copy_(padded.view(panels, PANEL, steps, depth).permute(0, 2, 1, 3))
    return packed.flatten()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two matrices [out, …] (or vectors) → one: a panel of the first, a panel of the second, each padded with zeros."""
    halves = []
    for half in (gate, up):
        padding = [0, 0] * (half.dim() - 1) + [0, -half.shape[0] % PANEL]
        halves.append(torch.nn.functional.pad(half, padding).unflatten(0, (-1, PANEL)))
    return torch.stack(halves, dim=1).flatten(0, 2)
