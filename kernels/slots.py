"""What a backend offers if it works out on the device where the tokens of a step stand. Knows no implementation.

The host then uploads neither positions nor slots: both follow from block tables, lengths and rows, which are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

MapSlots = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""map_slots(rows, query_start_loc, seq_lens, slots, positions) fills the last two from the first three.

rows: int64 [num_seqs], of the block tables; query_start_loc: int32 [num_seqs + 1] and seq_lens: int32 [num_seqs] as in
`kernels.metadata`; slots: int64 [num_groups, n]; positions: int64 [n]. n may exceed the number of tokens: what is
behind them gets slot -1 and position 0. It only enqueues work, which may be recorded.
"""


@runtime_checkable
class SlotBackend(Protocol):
    """An attention backend that maps slots on the device."""

    def slot_mapper(self, tables: Sequence[Tensor], block_sizes: Sequence[int]) -> MapSlots:
        """For block tables int32 [num_rows, max_blocks], one per cache group, that stay where they are.

        block_sizes: tokens of a kernel block, per group. Calls are counted as "slot_mapping".
        """
        ...
