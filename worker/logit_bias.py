"""What is added to single logits of a row: `logit_bias`, and -inf for stop tokens that may not come yet (min_tokens).

Per row a short list of token ids, fixed when the row is admitted; a row that asks for nothing costs nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.transfer import to_device
from protocol.messages import SamplingParams


class _Bias(NamedTuple):
    token_ids: np.ndarray  # int64 [n], distinct
    values: np.ndarray  # float32 [n]


class _Stops(NamedTuple):
    """Stop tokens that may not be drawn while the row knows fewer than `until` tokens."""

    token_ids: np.ndarray  # int64 [n], distinct
    minus_inf: np.ndarray  # float32 [n]
    until: int


class LogitBias:
    """The biases of all rows that have one."""

    def __init__(self) -> None:
        self._bias: dict[int, _Bias] = {}
        self._stops: dict[int, _Stops] = {}

    def admit(self, row: int, sampling: SamplingParams, prompt_len: int) -> None:
        """A request enters a row."""
        if sampling.logit_bias:
            ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
            self._bias[row] = _Bias(ids, np.fromiter(sampling.logit_bias.values(), np.float32))
        if sampling.min_tokens and sampling.stop_token_ids:
            ids = np.unique(np.asarray(sampling.stop_token_ids, dtype=np.int64))
            minus_inf = np.full(len(ids), -np.inf, dtype=np.float32)
            self._stops[row] = _Stops(ids, minus_inf, prompt_len + sampling.min_tokens)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._bias.pop(row, None)
        self._stops.pop(row, None)

    def early_stops(self, row: int, num_tokens: int) -> np.ndarray | None:
        """The stop tokens that a row which knows `num_tokens` may not draw yet, int64 [n]; None: it may draw all."""
        stops = self._stops.get(row)
        return stops.token_ids if stops is not None and num_tokens < stops.until else None

    def apply(
        self, logits: Tensor, rows: Sequence[int], num_tokens: Sequence[int], stops_excepted: Container[int] = ()
    ) -> None:
        """Add the biases in place. logits: float32 [R, V], one row for each of `rows`, which know `num_tokens`; of
        those in `stops_excepted` somebody else keeps the stop tokens back."""
        places, ids, values = [], [], []
        for place, (row, known) in enumerate(zip(rows, num_tokens, strict=True)):
            bias, stops = self._bias.get(row), self._stops.get(row)
            if bias is not None:
                places.append(np.full(len(bias.token_ids), place))
                ids.append(bias.token_ids)
                values.append(bias.values)
            if stops is not None and known < stops.until and row not in stops_excepted:
                places.append(np.full(len(stops.token_ids), place))
                ids.append(stops.token_ids)
                values.append(stops.minus_inf)
        if places:
            where = to_device(np.stack((np.concatenate(places), np.concatenate(ids))), logits.device)
            what = to_device(np.concatenate(values), logits.device)
            logits.index_put_((where[0], where[1]), what, accumulate=True)
