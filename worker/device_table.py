"""A block table as the device sees it: it changes only in `commit`, and only where the CPU buffer changed."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.block_table import BlockTable


class DeviceTable:
    """int32 [num_rows, max_blocks] on `device`, the committed copy of `table`."""

    def __init__(self, table: BlockTable, device: torch.device):
        self.table = table
        self.tensor: Tensor = torch.zeros(table.cpu.shape, dtype=torch.int32, device=device)
        self._host = self.tensor.numpy() if device.type == "cpu" else None

    def commit(self) -> None:
        """Copy what changed. What a copy in flight reads is a snapshot that nobody writes to again."""
        for row, start, end in self.table.commit():
            changed = self.table.cpu[row, start:end]
            if self._host is not None:
                self._host[row, start:end] = changed
            else:
                self.tensor[row, start:end].copy_(torch.from_numpy(changed.copy()), non_blocking=True)
