"""Which program of the attention kernel computes what: the work list of one step. Pure Python and numpy, no device.

An item is a block of one sequence's query tokens (all query heads of a KV head together) against a range of its keys. A
long range is cut at multiples of a fixed split *size*, counted from key 0, never into a fixed number of parts: where a
sequence is cut must not depend on its neighbours, or its bits would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 6
"""seq, first query token, first key, end of keys, first key that may be read, partial slot (-1: write the result)."""
MERGE_FIELDS = 4
"""seq, first query token, first partial slot, number of partial slots."""


@dataclass(frozen=True)
class WorkList:
    """items int32 [n, ITEM_FIELDS], longest first; merges int32 [m, MERGE_FIELDS]; num_partials: slots to allocate."""

    items: NDArray[np.int32]
    merges: NDArray[np.int32]
    num_partials: int


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    sequences: Sequence[int],
    *,
    block_q: int,
    tile: int,
    split_size: int,
    window: int | None,
) -> WorkList:
    """The work of `sequences` (indices into the two lengths). block_q: query tokens of an item; split_size: keys.

    split_size must be a multiple of tile. A sequence without visible keys still gets its items: they write zeros.
    """
    if split_size % tile:
        raise ValueError(f"split_size {split_size} is no multiple of the tile {tile}")
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    num_partials = 0
    for seq in sequences:
        context = seq_lens[seq] - query_lens[seq]
        for first in range(0, query_lens[seq], block_q):
            last = min(first + block_q, query_lens[seq]) - 1
            end = max(0, context + last + 1)
            live = max(0, context + first - window + 1) if window else 0
            start = live // tile * tile
            cuts = [start, *range(start // split_size * split_size + split_size, end, split_size), end]
            if len(cuts) <= 2:
                items.append((seq, first, start, end, live, -1))
                continue
            merges.append((seq, first, num_partials, len(cuts) - 1))
            for low, high in pairwise(cuts):
                items.append((seq, first, low, high, live, num_partials))
                num_partials += 1
    items.sort(key=lambda item: item[2] - item[3])  # stable: equal lengths stay in order
    return WorkList(
        np.array(items, dtype=np.int32).reshape(-1, ITEM_FIELDS),
        np.array(merges, dtype=np.int32).reshape(-1, MERGE_FIELDS),
        num_partials,
    )
