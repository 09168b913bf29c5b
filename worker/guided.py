"""Rows whose output has a given shape: before each draw, every token that the grammar does not allow here is excluded.

A row's matcher is compiled while the model computes its prompt, in a thread, and then follows the tokens that are
drawn. A row that is admitted again, after a preemption or on another worker, follows the output it has already. When
the shape is complete only the model's end token is left. A grammar that breaks (one that the gateway has not seen, or
that becomes too complex on the way) fails its row and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from kernels.transfer import to_device
from protocol.grammar import BadGrammar, compile_grammar, fill_masks, open_vocabulary
from protocol.messages import StructuredOutputsParams

_LOG = logging.getLogger("worker")

EarlyStops = Callable[[int], "np.ndarray | None"]
"""row → the stop tokens (int64 [n]) that it may not draw yet, or None."""


class Guides:
    """The matchers of all guided rows. The vocabulary is read in the background, from the model's folder.

    num_threads: for the masks of several rows.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1):
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary: Future[LLTokenizer] = self._thread.submit(open_vocabulary, folder, vocab_size, eos_token_ids)
        self._matchers: dict[int, Future[LLMatcher]] = {}
        self._broken: set[int] = set()

    def __contains__(self, row: object) -> bool:
        return row in self._matchers

    def admit(self, row: int, shape: StructuredOutputsParams, output: Sequence[int]) -> None:
        """A request enters a row, with the output it has already."""
        self._matchers[row] = self._thread.submit(self._start, shape, list(output))

    def forget(self, row: int) -> None:
        """The row is free."""
        self._matchers.pop(row, None)
        self._broken.discard(row)

    def is_broken(self, row: int) -> bool:
        """Whether its grammar cannot be followed."""
        return row in self._broken

    def add(self, row: int, token: int) -> None:
        """A guided row has drawn a token."""
        matcher = self._matcher(row)
        if matcher is not None and not matcher.is_stopped():
            matcher.consume_token(token)

    def apply(self, logits: Tensor, rows: Sequence[int], early_stops: EarlyStops) -> None:
        """Exclude in place what the grammars do not allow. logits: float32 [R, V], one row for each of `rows`.

        The row of a broken grammar becomes NaN: it has no token. Stop tokens wait for min_tokens as long as anything
        else is allowed.
        """
        places = [place for place, row in enumerate(rows) if row in self._matchers]
        if not places:
            return
        masks = np.zeros((len(places), (self._vocab_size + 31) // 32), dtype=np.int32)
        self._fill([rows[place] for place in places], masks, early_stops)
        packed = to_device(masks, logits.device)
        bits = (packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
        excluded = bits.flatten(1)[:, : self._vocab_size] == 0  # [G, V]
        if len(places) == len(rows):
            logits.masked_fill_(excluded, float("-inf"))
        else:
            where = to_device(np.array(places), logits.device)
            logits[where] = logits[where].masked_fill_(excluded, float("-inf"))
        for place in places:
            if rows[place] in self._broken:
                logits[place] = float("nan")

    def _start(self, shape: StructuredOutputsParams, output: list[int]) -> LLMatcher:
        matcher = compile_grammar(self._vocabulary.result(), shape)
        for token in output:
            if matcher.is_stopped():
                break
            matcher.consume_token(token)
        return matcher

    def _matcher(self, row: int) -> LLMatcher | None:
        """None when the grammar is broken; that is logged once."""
        if row in self._broken:
            return None
        try:
            matcher = self._matchers[row].result()
            problem = matcher.get_error() if matcher.is_error() else ""
        except BadGrammar as error:
            problem = str(error)
        if not problem:
            return matcher
        self._broken.add(row)
        _LOG.warning("row %d: its grammar broke: %s", row, problem.partition("\n")[0])
        return None

    def _fill(self, rows: Sequence[int], masks: np.ndarray, early_stops: EarlyStops) -> None:
        """masks: int32 [G, ⌈V / 32⌉], zeros; one for each of the rows. That of a broken grammar stays empty."""
        running: list[tuple[LLMatcher, int]] = []
        for index, row in enumerate(rows):
            matcher = self._matcher(row)
            if matcher is not None and matcher.is_stopped():
                _set_bits(masks[index], np.array(self._vocabulary.result().eos_tokens, dtype=np.int64))
            elif matcher is not None:
                running.append((matcher, index))
        fill_masks(running, masks, self._num_threads)
        for _, index in running:
            row = rows[index]
            if self._matcher(row) is None:  # a limit was exceeded just now
                masks[index] = 0
                continue
            stops = early_stops(row)
            if stops is not None:
                held = masks[index].copy()
                _clear_bits(held, stops)
                if held.any():
                    masks[index] = held


def _set_bits(mask: np.ndarray, token_ids: np.ndarray) -> None:
    """mask: int32 [⌈V / 32⌉]."""
    np.bitwise_or.at(mask.view(np.uint32), token_ids >> 5, np.uint32(1) << (token_ids & 31).astype(np.uint32))


def _clear_bits(mask: np.ndarray, token_ids: np.ndarray) -> None:
    np.bitwise_and.at(mask.view(np.uint32), token_ids >> 5, ~(np.uint32(1) << (token_ids & 31).astype(np.uint32)))
