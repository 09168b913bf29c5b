"""Hidden states → logits over the vocabulary, in float32 where it matters: at the top.

Products in bfloat16 come out rounded to 8 bits: among logits near 25 everything within an eighth is equal, and the most
probable token would be decided by token order. So the greatest logits of each row are computed once more in float32
from the same weights: a few hundred dot products instead of a second, twice as large weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers.linear import Linear

REFINED = 16
"""Logits per row that are computed anew. Eight bits leave far fewer near the top in practice."""

_BLOCK = 64


class OutputHead:
    """The output projection. weight: [V, H], also kept as it is, since tied embeddings share it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.linear = Linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → float32 [R, V]."""
        logits: Tensor = self.linear(hidden).float()
        if self.weight.dtype is torch.float32 or not len(hidden):
            return logits
        best = top_indices(logits, min(REFINED, logits.shape[1]))  # [R, K]
        rows = self.weight[best].float()  # [R, K, H]
        exact = torch.bmm(rows, hidden.float()[:, :, None])[:, :, 0]
        return logits.scatter_(1, best, exact)


def top_indices(rows: Tensor, count: int) -> Tensor:
    """Indices int64 [R, count] of the greatest values of each row of [R, V], in no particular order.

    They lie in the `count` blocks with the greatest maxima, so a row is swept once and few of its blocks are sorted.
    """
    num_rows, vocab = rows.shape
    if vocab % _BLOCK or vocab // _BLOCK <= count:
        return rows.topk(count, dim=1, sorted=False).indices
    blocks = rows.view(num_rows, -1, _BLOCK)
    chosen = blocks.amax(dim=2).topk(count, dim=1, sorted=False).indices  # [R, count]
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    place = candidates.topk(count, dim=1, sorted=False).indices
    return chosen.gather(1, place // _BLOCK) * _BLOCK + place % _BLOCK
