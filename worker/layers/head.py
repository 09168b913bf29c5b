"""Hidden states → logits over the vocabulary, in float32 where it matters: at the top.

Products that come out in bfloat16 are rounded to 8 bits: among logits near 25 everything within an eighth is equal, and
the most probable token would be decided by token order. int8 products are coarser still. So where products are not
summed up to float32 logits, the greatest of each row are computed once more in float32 from the same weights: a few
hundred dot products instead of a second, twice as large weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.layers.quantization import has_cpu_layers, make_linear
from worker.top import top

if TYPE_CHECKING:
    from kernels.cpu.team import Team

REFINED = 16
"""Logits per row that are computed anew. Eight bits leave far fewer near the top in practice."""


class OutputHead:
    """The output projection. weight: [V, H], also kept as it is, since tied embeddings share it.

    quantization: of all products but those of the greatest, which stay float32.
    """

    def __init__(self, weight: Tensor, *, quantization: str = "none", team: Team | None = None) -> None:
        self.weight = weight
        self.linear = make_linear(weight, quantization=quantization, team=team, out_dtype=torch.float32)
        self._exact = quantization == "none" and (
            weight.dtype is torch.float32 or has_cpu_layers(weight.device, weight.dtype)
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → float32 [R, V]."""
        logits: Tensor = self.linear(hidden).float()
        if self._exact or not len(hidden):
            return logits
        _, best = top(logits, min(REFINED, logits.shape[1]))  # [R, K]
        rows = self.weight[best].float()  # [R, K, H]
        exact = torch.bmm(rows, hidden.float()[:, :, None])[:, :, 0]
        return logits.scatter_(1, best, exact)
