"""The device's copy of a block table: it changes at commits only, and only where the table changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.block_table import BlockTable
from worker.device_table import DeviceTable


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def committed_by_scatter(device: DeviceTable) -> int:
    """As a step does it: what changed is taken, crosses, and is scattered. Returns the number of entries."""
    index, values = device.take_changes()
    assert len(set(index.tolist())) == len(index), "an entry that is written twice has either value"
    device.scatter(torch.from_numpy(index), torch.from_numpy(values))
    return len(index)


@pytest.mark.parametrize("commit", [DeviceTable.commit, committed_by_scatter])
def test_a_commit_brings_the_device_up_to_date(commit) -> None:
    table = BlockTable(3, 4, block_size=4, blocks_per_id=2)
    device = DeviceTable(table, torch.device("cpu"))
    table.add_row(0, ids(5, 6))
    table.add_row(2, ids(7))
    table.append_one_each(np.array([0, 2]), ids(8, 9))
    assert not device.tensor.any(), "nothing before the commit"
    commit(device)
    assert device.tensor.numpy().tolist() == table.cpu.tolist()
    table.null_front(0, 0, 1)
    table.clear_row(2)
    table.add_row(2, ids(3))
    commit(device)
    assert device.tensor.numpy().tolist() == table.cpu.tolist()


def test_only_what_changed_is_sent_and_later_changes_do_not_reach_it() -> None:
    table = BlockTable(64, 100, block_size=16)
    device = DeviceTable(table, torch.device("cpu"))
    for row in range(64):
        table.add_row(row, np.arange(1, 100, dtype=np.int32))
    assert committed_by_scatter(device) == 64 * 99
    table.append_row(5, ids(77))
    index, values = device.take_changes()
    table.clear_row(5)
    assert (index.tolist(), values.tolist()) == ([5 * 100 + 99], [77])
    assert [len(part) for part in DeviceTable(BlockTable(1, 1, 16), torch.device("cpu")).take_changes()] == [0, 0]
