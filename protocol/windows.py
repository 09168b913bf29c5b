"""Where a sliding window begins, in blocks. Both planes derive it, so it needs no message.

A query at position p of a layer with window W sees the keys max(0, p - W + 1) … p, itself included.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Position = TypeVar("Position", int, NDArray[np.int64])


def first_live_block(position: Position, window: int, block_size: int) -> Position:
    """Index of the first block that the query at `position` (and any later one) still sees; those before may go."""
    first_key = position - window + 1
    if isinstance(first_key, int):
        return max(0, first_key) // block_size
    return np.maximum(0, first_key) // block_size


def most_live_blocks(num_tokens: int, window: int, block_size: int) -> int:
    """Blocks a sequence of `num_tokens` can need at once in a group of this window (0: full attention), decoding."""
    blocks = -(-num_tokens // block_size)
    if window == 0:
        return blocks
    return min(blocks, -(-(window - 1) // block_size) + 1)
