"""Log-probabilities of tokens, from logits as the model made them: of the token itself, its rank, and of the top.

logprob(t) = logit(t) - log Σ exp(logit)      rank(t) = 1 + number of tokens with a greater logit
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device
from protocol.logprobs import lists_of
from protocol.messages import LogprobsLists
from worker.top import top


@torch.inference_mode()
def logprobs_of(logits: Tensor, tokens: Tensor, counts: np.ndarray) -> LogprobsLists:
    """logits float32 [R, V], tokens int64 [R], counts int64 [R] → R places.

    counts: candidates told of each row: 0 none, 1 the token alone, 1 + k the token and the k most probable ones. A
    negative token (of a row that failed) has none.
    """
    counts = np.where(tokens.cpu().numpy() < 0, 0, np.minimum(counts, logits.shape[1] + 1))
    asked = np.nonzero(counts)[0]
    ranks = np.zeros(len(counts), dtype=np.int64)
    if not len(asked):
        return lists_of(counts, ranks, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
    if len(asked) < len(counts):
        rows = to_device(asked, logits.device)
        logits, tokens = logits[rows], tokens[rows]
    total = torch.logsumexp(logits, dim=1, keepdim=True)  # [A, 1]
    own = logits.gather(1, tokens[:, None])  # [A, 1]
    ranks[asked] = (1 + (logits > own).sum(dim=1)).cpu().numpy()
    most = int(counts.max()) - 1
    values, ids = own, tokens[:, None]
    if most:
        best, best_ids = top(logits, most)
        values, ids = torch.cat((own, best), dim=1), torch.cat((ids, best_ids), dim=1)
    told = np.arange(most + 1) < counts[asked][:, None]  # bool [A, 1 + most]
    return lists_of(counts, ranks, ids.cpu().numpy()[told], (values - total).cpu().numpy()[told])
