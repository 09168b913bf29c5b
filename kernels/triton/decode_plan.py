"""The work list of a decode step in a buffer of fixed size, for graphs. Pure numpy; launches nothing.

The list of the step stands first, in the same order and with the same cuts as without a graph, so the results have the
same bits. Behind it come items of sequence 0 whose first query token lies beyond any sequence: they load no key and
store nothing. Merges likewise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.triton.plan import ITEM_FIELDS, MERGE_FIELDS, plan_attention

BEYOND = 1 << 30
"""As first query token: no sequence has it, and no sum with a context overflows 32 bits."""

IDLE_ITEM = (0, BEYOND, 0, 0, 0, -1)
IDLE_MERGE = (0, BEYOND, 0, 0)

MOST_SPLITS = 1024
"""Room for splits beyond one item a sequence. A step with more work is run without a graph: idle programs of a graph
cost about as much as launching it, and partial results take device memory."""


class DecodeWork:
    """Room for the work of `max_seqs` sequences of up to `max_seq_len` tokens, cut every `split_size` keys.

    tile: keys; block_q: query tokens that an item of the launch has room for.
    """

    def __init__(
        self, *, max_seqs: int, max_seq_len: int, tile: int, split_size: int, window: int | None, block_q: int
    ):
        self.tile = tile
        self.block_q = block_q
        self.split_size = split_size
        self.window = window
        cuts = max(1, -(-max_seq_len // split_size))
        if window:  # it may begin and end inside a split
            cuts = min(cuts, -(-(window + tile) // split_size) + 1)
        self.max_items = min(max_seqs * cuts, max_seqs + MOST_SPLITS)
        self.max_merges = max_seqs if cuts > 1 else 0
        self.max_partials = self.max_items if cuts > 1 else 0
        self._item_words = _padded(self.max_items * ITEM_FIELDS)
        self.num_words = self._item_words + _padded(self.max_merges * MERGE_FIELDS)

    def pack(self, seq_lens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """See `kernels.graphs.DecodePlan`."""
        work = plan_attention(
            np.ones_like(seq_lens), seq_lens, np.nonzero(seq_lens)[0],
            block_q=self.block_q, tile=self.tile, split_size=self.split_size, window=self.window,
        )  # fmt: skip
        num_items, num_merges = len(work.items), len(work.merges)
        if num_items > self.max_items or num_merges > self.max_merges or work.num_partials > self.max_partials:
            return None
        words = np.zeros(self.num_words, dtype=np.int32)
        items, merges = self.items(words), self.merges(words)
        items[:num_items], items[num_items:] = work.items, IDLE_ITEM
        merges[:num_merges], merges[num_merges:] = work.merges, IDLE_MERGE
        return words

    def items(self, words: Any) -> Any:
        """The part of words (array or tensor, int32 [num_words]) that holds items: [max_items, ITEM_FIELDS]."""
        return words[: self.max_items * ITEM_FIELDS].reshape(self.max_items, ITEM_FIELDS)

    def merges(self, words: Any) -> Any:
        """Likewise the merges: [max_merges, MERGE_FIELDS]."""
        end = self._item_words + self.max_merges * MERGE_FIELDS
        return words[self._item_words : end].reshape(self.max_merges, MERGE_FIELDS)


def _padded(count: int) -> int:
    """Whole multiples of 16 bytes: Triton compiles another kernel for pointers that are less aligned."""
    return -(-count // 4) * 4
