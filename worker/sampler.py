"""From logits to the next token of each row: one batch operation. Knows no request; keeps no state.

Temperature, then top-k and min-p, then top-p over what those left: the order of vLLM. Each filter is a lowest value
that a token must reach, so tokens tied with the last one kept are kept too, and no filter needs a sorted row. A draw is
an exponential race: every token runs for weight / -log(uniform(seed, position, token)) and the greatest wins, blocks of
tokens first, then the tokens of the winning block. Unlike the inverse of a cumulative sum, its outcome does not hang
on the rounding of sums, so a sequence draws the same tokens in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device
from worker.top import greatest, in_blocks, pick_block, top
from worker.uniform import uniform

GREEDY_BELOW = 1e-5
"""Temperatures below this mean: the most probable token."""

FAILED = -1
"""The token of a row without a finite greatest logit (NaN or +inf somewhere, or nothing but -inf)."""

_TOP_P_VALUES = 128
"""So many of the greatest weights are nearly always enough for top-p; if not, the row is sorted."""

_LOWEST_SCORE = -60.0
"""Weights under e^-60 of the greatest are 0: no draw can tell, and subnormals are 60 times slower."""

_BLOCK_INDEX = 1 << 31
"""Index of the random number of a draw's first block; those below belong to the token ids."""


@dataclass(frozen=True)
class SamplingBatch:
    """How each of R rows samples: numpy arrays [R]."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32; <= 0 or >= vocabulary: off
    top_p: np.ndarray  # float32; >= 1: off; <= 0: the most probable token
    min_p: np.ndarray  # float32, relative to the most probable token; <= 0: off
    seed: np.ndarray  # uint64
    sampled_rows: np.ndarray = field(init=False)
    """int64, ascending: the rows that draw. The others are greedy, also by a filter that leaves one token."""

    def __post_init__(self) -> None:
        greedy = self.temperature < GREEDY_BELOW
        greedy |= (self.top_k == 1) | (self.top_p <= 0) | (self.min_p >= 1)
        object.__setattr__(self, "sampled_rows", np.nonzero(~greedy)[0])

    @property
    def all_greedy(self) -> bool:
        return len(self.sampled_rows) == 0

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingBatch:
        """A batch that takes the most probable token everywhere."""
        return cls(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
        )


@torch.inference_mode()
def sample(logits: Tensor, params: SamplingBatch, positions: Tensor) -> Tensor:
    """logits float32 [R, V], positions int64 [R] of the tokens to be drawn → int64 [R], FAILED where a row is broken.

    The logits are left as they are; `positions` are where the new tokens will stand in their sequences.
    """
    if len(params.temperature) != logits.shape[0] or positions.shape[0] != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(params.temperature)} of parameters")
    peaks, tokens = greatest(logits)
    if not params.all_greedy:
        rows = to_device(params.sampled_rows, logits.device)
        tokens[rows] = _draw(_rows(logits, rows), peaks[rows], params, positions[rows])
    return torch.where(torch.isfinite(peaks), tokens, FAILED)


def _draw(logits: Tensor, peaks: Tensor, params: SamplingBatch, positions: Tensor) -> Tensor:
    """One token for each of the sampled rows: logits [S, V], peaks float32 [S], positions [S] → int64 [S]."""
    chosen, device = params.sampled_rows, logits.device
    temperature = to_device(params.temperature[chosen], device)
    scores = (logits - peaks[:, None]).div_(temperature[:, None])  # 0 is the most probable token
    lowest = _lowest_scores(scores, params.top_k[chosen], params.min_p[chosen])
    keep = torch.ge(scores, lowest[:, None], out=torch.empty_like(scores))  # 1.0 or 0.0
    weights = scores.clamp_(min=_LOWEST_SCORE).exp_().mul_(keep)
    _apply_top_p(weights, params.top_p[chosen])
    seeds = to_device(params.seed[chosen].view(np.int64), device)
    return _race(weights, seeds[:, None], positions[:, None])


def _lowest_scores(scores: Tensor, top_k: np.ndarray, min_p: np.ndarray) -> Tensor:
    """The score that a token of each row must reach, float32 [S], by top-k and min-p."""
    with np.errstate(divide="ignore"):
        lowest = np.maximum(np.log(np.maximum(min_p, 0), dtype=np.float32), np.float32(_LOWEST_SCORE))
    result = to_device(lowest, scores.device)
    limited = np.nonzero((top_k > 0) & (top_k < scores.shape[1]))[0]
    if len(limited):
        rows, k = to_device(limited, scores.device), to_device(top_k[limited].astype(np.int64), scores.device)
        values = top(_rows(scores, rows), int(top_k[limited].max()))[0]
        result[rows] = torch.maximum(result[rows], values.gather(1, (k - 1)[:, None])[:, 0])
    return result


def _apply_top_p(weights: Tensor, top_p: np.ndarray) -> None:
    """In each row keep the fewest greatest weights [S, V] that hold the share top_p of the sum; make the others 0."""
    limited = np.nonzero(top_p < 1)[0]
    if not len(limited):
        return
    rows = to_device(limited, weights.device)
    part = _rows(weights, rows)
    total = in_blocks(part, 0.0).sum(dim=2).double().sum(dim=1)
    wanted = total * to_device(top_p[limited].astype(np.float64), weights.device)
    count = min(_TOP_P_VALUES, weights.shape[1])
    lowest, enough = _last_needed(top(part, count)[0], wanted)
    if count < weights.shape[1] and not bool(enough.all()):
        rest = torch.nonzero(~enough)[:, 0]
        lowest[rest], _ = _last_needed(part[rest].sort(dim=1, descending=True).values, wanted[rest])
    keep = torch.ge(part, lowest[:, None], out=torch.empty_like(part))
    if part is weights:
        weights.mul_(keep)
    else:
        weights[rows] = part.mul_(keep)


def _last_needed(values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of descending values [S, n], the one that brings the sum up to `wanted` [S] (else the last), and if one does."""
    index = (values.double().cumsum(dim=1) < wanted[:, None]).sum(dim=1)
    enough = index < values.shape[1]
    return values.gather(1, index.clamp(max=values.shape[1] - 1)[:, None])[:, 0], enough


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The rows (ascending indices) of a matrix: itself if they are all."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def _race(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One index for each row, drawn by weight: weights float32 [S, V]; seeds and positions int64 [S, 1] → int64 [S]."""
    blocks = in_blocks(weights, 0.0)
    num_blocks, size = blocks.shape[1:]
    numbers = torch.arange(max(num_blocks, size), device=weights.device)
    block = _winner(blocks.sum(dim=2), uniform(seeds, positions, numbers[:num_blocks] + _BLOCK_INDEX))
    ids = block[:, None] * size + numbers[:size]
    return block * size + _winner(pick_block(blocks, block), uniform(seeds, positions, ids))


def _winner(weights: Tensor, u: Tensor) -> Tensor:
    """weights float32 [S, n], u float64 [S, n] in (0, 1) → int64 [S]."""
    return (weights.double() / -u.log()).argmax(dim=1)
