"""The block table against a dict: whatever happens to its rows, nothing stale is left, and a commit tells all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.block_table import BlockTable

ROWS, BLOCKS = 4, 6


@pytest.mark.parametrize("blocks_per_id", [1, 2])
def test_the_device_sees_the_rows_and_null_everywhere_else(blocks_per_id: int) -> None:
    """Rows are added, grown, lose their fronts and leave; `device` is changed by commits alone."""

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def history(data: st.DataObject) -> None:
        table = BlockTable(ROWS, BLOCKS, 4, blocks_per_id)
        device = np.zeros_like(table.cpu)
        model: dict[int, list[int]] = {}
        next_id = 1
        for _ in range(data.draw(st.integers(1, 40))):
            row = data.draw(st.integers(0, ROWS - 1))
            operation = data.draw(st.sampled_from(["add", "append", "one each", "null", "clear", "commit"]))
            if operation == "add" and row not in model:
                count = data.draw(st.integers(0, BLOCKS))
                model[row] = list(range(next_id, next_id + count))
                table.add_row(row, np.array(model[row], dtype=np.int32))
                next_id += count
            elif operation == "append" and row in model:
                count = data.draw(st.integers(0, BLOCKS - len(model[row])))
                new = list(range(next_id, next_id + count))
                table.append_row(row, np.array(new, dtype=np.int32))
                model[row] += new
                next_id += count
            elif operation == "one each":
                rows = [row for row in sorted(model) if len(model[row]) < BLOCKS]
                new = list(range(next_id, next_id + len(rows)))
                table.append_one_each(np.array(rows, dtype=np.int64), np.array(new, dtype=np.int32))
                for owner, block_id in zip(rows, new, strict=True):
                    model[owner].append(block_id)
                next_id += len(rows)
            elif operation == "null" and row in model:
                end = data.draw(st.integers(0, len(model[row])))
                start = sum(block_id == 0 for block_id in model[row])
                if start < end:
                    assert table.null_front(row, start, end).tolist() == model[row][start:end]
                    model[row][:end] = [0] * end
            elif operation == "clear":
                table.clear_row(row)
                model.pop(row, None)
            elif operation == "commit":
                _commit(table, device)
        _commit(table, device)
        assert table.commit() == []
        for row in range(ROWS):
            ids = model.get(row, [])
            expected = [b * blocks_per_id + part if b else 0 for b in ids for part in range(blocks_per_id)]
            assert device[row].tolist() == expected + [0] * (BLOCKS * blocks_per_id - len(expected))

    history()


def _commit(table: BlockTable, device: np.ndarray) -> None:
    for row, start, end in table.commit():
        device[row, start:end] = table.cpu[row, start:end]


def test_a_row_cannot_grow_past_its_end() -> None:
    table = BlockTable(1, 2, 4)
    table.add_row(0, np.array([3, 4], dtype=np.int32))
    with pytest.raises(ValueError, match="at most 2 fit"):
        table.append_row(0, np.array([5], dtype=np.int32))
    with pytest.raises(ValueError, match="past 2 blocks"):
        table.append_one_each(np.array([0]), np.array([5], dtype=np.int32))
    assert table.cpu[0].tolist() == [3, 4]
