"""Which program of the attention kernel computes what: the work list of one step. Pure numpy, no device.

An item is a block of one sequence's query tokens (all query heads of a KV head together) against a range of its keys. A
long range is cut at multiples of a fixed split *size*, counted from key 0, never into a fixed number of parts: where a
sequence is cut must not depend on its neighbours, or its bits would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 6
"""seq, first query token, first key, end of keys, first key that may be read, partial slot (-1: write the result)."""
MERGE_FIELDS = 4
"""seq, first query token, first partial slot, number of partial slots."""

Ints = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class WorkList:
    """items int32 [n, ITEM_FIELDS], longest first; merges int32 [m, MERGE_FIELDS]; num_partials: slots to allocate.

    The first part of a cut range is the one whose first key is not beyond the first that may be read: it alone
    counts the sink.
    """

    items: NDArray[np.int32]
    merges: NDArray[np.int32]
    num_partials: int


def plan_attention(
    query_lens: Ints,
    seq_lens: Ints,
    sequences: Ints | range,
    *,
    block_q: int,
    tile: int,
    split_size: int,
    window: int | None,
    causal: bool = True,
) -> WorkList:
    """The work of `sequences` (indices into the two lengths). block_q: query tokens of an item; split_size: keys.

    split_size must be a multiple of tile. A sequence without visible keys still gets its items: they write zeros.
    A window of a query that is not causal reaches to both sides: window - 1 keys before it and as many behind.
    """
    if split_size % tile:
        raise ValueError(f"split_size {split_size} is no multiple of the tile {tile}")
    chosen = np.asarray(sequences, dtype=np.int64)
    lengths = np.asarray(query_lens, dtype=np.int64)[chosen]
    seen = np.asarray(seq_lens, dtype=np.int64)[chosen]

    blocks = -(-lengths // block_q)  # of query tokens
    owner = np.repeat(np.arange(len(chosen)), blocks)
    first = _counted(blocks) * block_q
    last = np.minimum(first + block_q, lengths[owner]) - 1
    context = seen[owner] - lengths[owner]
    if causal:
        end = np.maximum(0, context + last + 1)
    elif window:
        end = np.minimum(seen[owner], np.maximum(0, context + last + window))
    else:
        end = seen[owner]
    live = np.maximum(0, context + first - window + 1) if window else np.zeros_like(end)
    start = live // tile * tile

    lowest = start // split_size
    parts = np.where(end > start, (np.maximum(end, 1) - 1) // split_size - lowest + 1, 1)
    block = np.repeat(np.arange(len(owner)), parts)
    part = _counted(parts)
    low = np.maximum(start[block], (lowest[block] + part) * split_size)
    high = np.minimum(end[block], (lowest[block] + part + 1) * split_size)
    cut = parts > 1
    slots = np.cumsum(cut[block]) - 1
    slot = np.where(cut[block], slots, -1)

    items = np.stack([chosen[owner][block], first[block], low, high, live[block], slot], axis=1)
    items = items[np.argsort(low - high, kind="stable")]  # long ones first; equal lengths stay in order
    first_slot = np.cumsum(parts * cut) - parts
    merges = np.stack([chosen[owner], first, first_slot, parts], axis=1)[cut]
    return WorkList(items.astype(np.int32), merges.astype(np.int32), int(cut[block].sum()))


def _counted(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, 3] → [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
