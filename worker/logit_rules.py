"""What rows ask of their logits before a token is drawn: a grammar, biases, early stop tokens, penalties.

Follows the plans: a request brings its rules when it enters a row, and they go when it leaves. The order is vLLM's:
the grammar first, then biases, then penalties; temperature and filters come after that (`worker.sampler`). As long as
no row asks for anything, a step costs one look at an empty set.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from protocol.arrays import unpack
from protocol.messages import NewRequestData, SamplingParams, SchedulerOutput
from worker.guided import Guides
from worker.logit_bias import LogitBias
from worker.penalties import Penalties, is_penalised

GRAMMAR_FAILED = -2
"""The token of a row whose grammar broke."""


class LogitRules:
    """The rules of all rows. `follow` every plan and `note` every token drawn, in the order of the steps."""

    def __init__(self, guides: Guides | None = None) -> None:
        self._guides = guides
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
        names, known = rows.tolist(), num_tokens.tolist()
        if self._guides is not None:
            by_row = dict(zip(names, known, strict=True))
            self._guides.apply(logits, names, lambda row: self._bias.early_stops(row, by_row[row]))
        self._bias.apply(logits, names, known, stops_excepted=self._guides or ())
        self._penalties.apply(logits, names)

    def note(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Rows int64 [R] have drawn tokens int32 [R]; negative ones failed and end."""
        if not self._rows:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if row in self._rows and token >= 0:
                self._penalties.add(row, token)
                if self._guides is not None and row in self._guides:
                    self._guides.add(row, token)

    def name_failures(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Tokens int32 [R] that rows [R] drew, with GRAMMAR_FAILED where a row has none because its grammar broke."""
        if self._guides is None or tokens.min(initial=0) >= 0:
            return tokens
        broken = np.fromiter((self._guides.is_broken(row) for row in rows.tolist()), np.bool_, len(rows))
        return np.where(broken & (tokens < 0), np.int32(GRAMMAR_FAILED), tokens)

    def _admit(self, request: NewRequestData) -> None:
        row, sampling = request.row, request.sampling
        self._rows.add(row)
        self._bias.admit(row, sampling, request.prompt_len)
        tokens = unpack(request.token_ids, "token_ids")
        self._penalties.admit(row, sampling, tokens, request.prompt_len)
        if sampling.structured_outputs is not None and self._guides is not None:
            self._guides.admit(row, sampling.structured_outputs, tokens[request.prompt_len :].tolist())

    def _forget(self, row: int) -> None:
        if row in self._rows:
            self._rows.discard(row)
            self._bias.forget(row)
            self._penalties.forget(row)
            if self._guides is not None:
                self._guides.forget(row)


def _has_rules(sampling: SamplingParams) -> bool:
    early_stops = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
    return bool(sampling.logit_bias) or early_stops or is_penalised(sampling) or sampling.structured_outputs is not None
