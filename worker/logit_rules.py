"""What rows ask of their logits before a token is drawn: biases, early stop tokens, penalties.

Follows the plans: a request brings its rules when it enters a row, and they go when it leaves. The order is vLLM's:
biases first, then penalties; temperature and filters come after that (`worker.sampler`). As long as no row asks for
anything, a step costs one look at an empty set.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from protocol.arrays import unpack
from protocol.messages import NewRequestData, SamplingParams, SchedulerOutput
from worker.logit_bias import LogitBias
from worker.penalties import Penalties, is_penalised


class LogitRules:
    """The rules of all rows. `follow` every plan and `note` every token drawn, in the order of the steps."""

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._bias = LogitBias()
        self._penalties = Penalties()

    def follow(self, plan: SchedulerOutput) -> None:
        """Rows that end are forgotten, those that begin bring their rules; the plan was applied to the batch."""
        if self._rows:
            for row in unpack(plan.finish_rows, "finish_rows").tolist():
                self._forget(row)
        for request in plan.admit:
            if _has_rules(request.sampling):
                self._admit(request)

    def start_epoch(self) -> None:
        """Every row is free."""
        for row in list(self._rows):
            self._forget(row)

    def concern(self, rows: np.ndarray) -> bool:
        """Whether any of these rows (int64 [R]) has a rule."""
        return bool(self._rows) and not self._rows.isdisjoint(rows.tolist())

    @torch.inference_mode()
    def apply(self, logits: Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Change float32 logits [R, V] in place. rows int64 [R] that sample, num_tokens int64 [R] they know; every one
        of those tokens has been noted."""
        names = rows.tolist()
        self._bias.apply(logits, names, num_tokens.tolist())
        self._penalties.apply(logits, names)

    def note(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Rows int64 [R] have drawn tokens int32 [R]; negative ones failed and end."""
        if not self._rows:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if row in self._rows and token >= 0:
                self._penalties.add(row, token)

    def _admit(self, request: NewRequestData) -> None:
        row, sampling = request.row, request.sampling
        self._rows.add(row)
        self._bias.admit(row, sampling, request.prompt_len)
        self._penalties.admit(row, sampling, unpack(request.token_ids, "token_ids"), request.prompt_len)

    def _forget(self, row: int) -> None:
        if row in self._rows:
            self._rows.discard(row)
            self._bias.forget(row)
            self._penalties.forget(row)


def _has_rules(sampling: SamplingParams) -> bool:
    early_stops = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
    return bool(sampling.logit_bias) or early_stops or is_penalised(sampling)
