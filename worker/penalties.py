"""Penalties on tokens that a sequence has used: repetition (prompt and output), frequency and presence (output).

    logit = logit / repetition if logit > 0 else logit * repetition      for every token of prompt or output
    logit = logit - frequency * (times in the output) - presence * (1 if in the output)

in this order, as in vLLM (`model_executor/layers/utils.py: apply_penalties`). Frequency and presence are OpenAI's,
repetition is CTRL's (Keskar et al. 2019, section 4.1). A row keeps the distinct tokens it has used and how often, so a
step touches as many logits as there are distinct tokens, not the vocabulary. A row that is admitted again, after a
preemption or on another worker, counts its prompt and output anew and goes on alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device
from protocol.messages import SamplingParams


def is_penalised(sampling: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


class _Used:
    """The tokens that one row has used: `ids` int64 [n], distinct, and `counts` float32 [n], times in the output."""

    def __init__(self, sampling: SamplingParams, tokens: np.ndarray, prompt_len: int):
        self.factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        repeats = sampling.repetition_penalty != 1.0
        counted = np.concatenate((tokens[:prompt_len] if repeats else tokens[:0], tokens[prompt_len:]))
        ids, inverse = np.unique(counted, return_inverse=True)
        in_output = np.zeros(len(counted), dtype=np.float64)
        in_output[len(counted) - (len(tokens) - prompt_len) :] = 1
        self.size = len(ids)
        self._ids = ids.astype(np.int64)
        self._counts = np.bincount(inverse, in_output, minlength=len(ids)).astype(np.float32)
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self.size]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        """The output has one token more."""
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if place == len(self._ids):
                room = max(16, place)
                self._ids = np.append(self._ids, np.zeros(room, dtype=np.int64))
                self._counts = np.append(self._counts, np.zeros(room, dtype=np.float32))
            self._ids[place] = token
            self.size += 1
        self._counts[place] += 1


class Penalties:
    """What all rows with a penalty have used."""

    def __init__(self) -> None:
        self._used: dict[int, _Used] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._used

    def admit(self, row: int, sampling: SamplingParams, tokens: np.ndarray, prompt_len: int) -> None:
        """A request enters a row. tokens: int32 [n], prompt and the output it has already."""
        if is_penalised(sampling):
            self._used[row] = _Used(sampling, tokens, prompt_len)

    def forget(self, row: int) -> None:
        """The row is free."""
        self._used.pop(row, None)

    def add(self, row: int, token: int) -> None:
        """The row has drawn a token."""
        if row in self._used:
            self._used[row].add(token)

    def apply(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Penalise in place. logits: float32 [R, V], one row for each of `rows`."""
        found = [(place, self._used[row]) for place, row in enumerate(rows) if row in self._used]
        found = [(place, used) for place, used in found if used.size]
        if not found:
            return
        sizes = [used.size for _, used in found]
        device = logits.device
        places = to_device(np.repeat([place for place, _ in found], sizes), device)
        ids = to_device(np.concatenate([used.ids for _, used in found]), device)
        counts = to_device(np.concatenate([used.counts for _, used in found]), device)
        factors = np.repeat(np.array([used.factors for _, used in found], dtype=np.float32), sizes, axis=0)
        repetition, frequency, presence = to_device(factors, device).unbind(1)
        values = logits[places, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        logits[places, ids] = values
