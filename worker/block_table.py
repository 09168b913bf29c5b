"""A cache group's block tables, by row: the worker's copy of what the scheduler decided. Pure numpy; no device.

The CPU buffer changes as plans are applied; a device sees nothing of it before `commit`, which hands over only what
changed since the last one. Entries past a row's length, and in front of a window, hold the null block (0).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Change(NamedTuple):
    """Entries [start, end) of `row` differ from what was last committed."""

    row: int
    start: int
    end: int


class BlockTable:
    """int32 [num_rows, max_blocks · blocks_per_id] of kernel block ids.

    The scheduler's blocks may be larger than the kernel's: its id b stands for the kernel blocks b·r … b·r + r - 1,
    with r = `blocks_per_id`. This is the only place that knows. `block_size`: tokens of a kernel block.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, blocks_per_id: int = 1):
        self.block_size = block_size
        self.blocks_per_id = blocks_per_id
        self.cpu: NDArray[np.int32] = np.zeros((num_rows, max_blocks * blocks_per_id), dtype=np.int32)
        self.num_ids: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """Length of each row in the scheduler's blocks."""
        self._dirty: dict[int, tuple[int, int]] = {}

    def add_row(self, row: int, ids: NDArray[np.int32]) -> None:
        """Start row `row`, which must be empty, with the scheduler's block ids (int32 [n]; 0 in a window's front)."""
        assert self.num_ids[row] == 0, f"row {row} is in use"
        self.append_row(row, ids)

    def append_row(self, row: int, ids: NDArray[np.int32]) -> None:
        """Append block ids (int32 [n]) to a row. Raises ValueError when it would grow past max_blocks."""
        have, r = int(self.num_ids[row]), self.blocks_per_id
        end = have + len(ids)
        if end * r > self.cpu.shape[1]:
            raise ValueError(f"row {row} would have {end} blocks, at most {self.cpu.shape[1] // r} fit")
        self.cpu[row, have * r : end * r] = self._expand(ids)
        self.num_ids[row] = end
        self._mark(row, have * r, end * r)

    def append_one_each(self, rows: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Append ids[i] to row rows[i] (rows distinct): the usual growth in decode."""
        at = self.num_ids[rows]
        if len(at) and int(at.max() + 1) * self.blocks_per_id > self.cpu.shape[1]:
            raise ValueError(f"a row would grow past {self.cpu.shape[1] // self.blocks_per_id} blocks")
        for offset in range(self.blocks_per_id):
            self.cpu[rows, at * self.blocks_per_id + offset] = ids * self.blocks_per_id + offset * (ids != 0)
        self.num_ids[rows] = at + 1
        r = self.blocks_per_id
        for row, start in zip(rows.tolist(), at.tolist(), strict=True):
            self._mark(row, start * r, (start + 1) * r)

    def null_front(self, row: int, start: int, end: int) -> NDArray[np.int32]:
        """Entries [start, end) of a row (scheduler's blocks) become null; returns the ids they held, int32."""
        r = self.blocks_per_id
        ids: NDArray[np.int32] = self.cpu[row, start * r : end * r : r] // r
        self.cpu[row, start * r : end * r] = 0
        self._mark(row, start * r, end * r)
        return ids

    def clear_row(self, row: int) -> None:
        """Forget a row: all its entries become null."""
        end = int(self.num_ids[row]) * self.blocks_per_id
        self.cpu[row, :end] = 0
        self.num_ids[row] = 0
        self._mark(row, 0, end)

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """slot_mapping int64 [n]: where the KV of position positions[i] of row rows[i] lies.

        slot = table[position // B] · B + position mod B.
        """
        blocks = self.cpu[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def commit(self) -> list[Change]:
        """What has to reach the device so that it sees this table; after this call it counts as seen."""
        changes = [Change(row, start, end) for row, (start, end) in self._dirty.items()]
        self._dirty.clear()
        return changes

    def _expand(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.blocks_per_id == 1:
            return ids
        expanded = ids[:, None] * self.blocks_per_id + np.arange(self.blocks_per_id, dtype=np.int32)
        return (expanded * (ids[:, None] != 0)).astype(np.int32).ravel()

    def _mark(self, row: int, start: int, end: int) -> None:
        if start >= end:
            return
        old = self._dirty.get(row)
        self._dirty[row] = (start, end) if old is None else (min(start, old[0]), max(end, old[1]))
