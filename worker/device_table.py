"""A block table as the device sees it: it changes only by what `BlockTable.commit` says has changed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.transfer import to_device
from worker.block_table import BlockTable


class DeviceTable:
    """int32 [num_rows, max_blocks] on `device`, the committed copy of `table`."""

    def __init__(self, table: BlockTable, device: torch.device):
        self.table = table
        self.tensor: Tensor = torch.zeros(table.cpu.shape, dtype=torch.int32, device=device)
        self._host = self.tensor.numpy() if device.type == "cpu" else None

    def commit(self) -> None:
        """Copy what changed, now."""
        if self._host is None:
            self.scatter(*(to_device(array, self.tensor.device) for array in self.take_changes()))
            return
        for row, start, end in self.table.commit():
            self._host[row, start:end] = self.table.cpu[row, start:end]

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """What changed since the last commit, which this is: places in the flat table int64 [n], all distinct, and what
        they hold now, int32 [n]. Copies: later changes of the table do not reach them."""
        changes = self.table.commit()
        if not changes:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        rows, starts, ends = np.array(changes, dtype=np.int64).T
        counts = ends - starts
        before = np.cumsum(counts) - counts
        index = np.repeat(rows * self.table.cpu.shape[1] + starts - before, counts) + np.arange(int(counts.sum()))
        return index, self.table.cpu.reshape(-1)[index]

    def scatter(self, index: Tensor, values: Tensor) -> None:
        """Take over changes, int64 [n] and int32 [n] on the device, behind the work enqueued before."""
        self.tensor.view(-1).index_copy_(0, index, values)
