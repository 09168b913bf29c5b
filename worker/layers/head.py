"""Hidden states → logits over the vocabulary, in float32 where it matters: at the top.

Products in bfloat16 come out rounded to 8 bits: among logits near 25 everything within an eighth is equal, and the most
probable token would be decided by token order. So the greatest logits of each row are computed once more in float32
from the same weights: a few hundred dot products instead of a second, twice as large weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers.quantization import make_linear
from worker.top import top

REFINED = 16
"""Logits per row that are computed anew. Eight bits leave far fewer near the top in practice."""


class OutputHead:
    """The output projection. weight: [V, H], also kept as it is, since tied embeddings share it.

    quantization: of all products but those of the greatest, which stay float32.
    """

    def __init__(self, weight: Tensor, *, quantization: str = "none") -> None:
        self.weight = weight
        self.linear = make_linear(weight, quantization=quantization)
        self._exact = weight.dtype is torch.float32 and quantization == "none"

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → float32 [R, V]."""
        logits: Tensor = self.linear(hidden).float()
        if self._exact or not len(hidden):
            return logits
        _, best = top(logits, min(REFINED, logits.shape[1]))  # [R, K]
        rows = self.weight[best].float()  # [R, K, H]
        exact = torch.bmm(rows, hidden.float()[:, :, None])[:, :, 0]
        return logits.scatter_(1, best, exact)
