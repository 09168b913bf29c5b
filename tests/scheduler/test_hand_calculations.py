"""The arithmetic of paging, worked out by hand: slots, blocks, waste, reuse, bytes."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.messages import KVCacheGroupSpec, SamplingParams
from scheduler.cache_manager import KVCacheManager
from scheduler.request import Request
from worker.block_table import BlockTable
from worker.kv_cache import slot_bytes

FULL = (KVCacheGroupSpec(sliding_window=0, layer_ids=(0,), num_kv_heads=1, head_dim=8),)


def request(name: str, num_tokens: int) -> Request:
    prompt = np.arange(num_tokens, dtype=np.int32)
    return Request(name, prompt, SamplingParams(), limit=1000, stop_ids=(), root=b"", arrival=0)


def slots(table: list[int], block_size: int, positions: list[int]) -> list[int]:
    block_table = BlockTable(num_rows=3, max_blocks=4, block_size=block_size)
    block_table.add_row(2, np.array(table, dtype=np.int32))
    rows = np.full(len(positions), 2, dtype=np.int64)
    return block_table.slots(rows, np.array(positions, dtype=np.int64)).tolist()


def test_slots_of_three_blocks_of_four() -> None:
    assert slots([7, 3, 11], 4, [0, 3, 4, 8, 9]) == [28, 31, 12, 44, 45]


def test_slots_of_two_blocks_of_sixteen() -> None:
    assert slots([5, 2], 16, [15, 16, 23]) == [95, 32, 39]


def test_slots_where_a_scheduler_block_is_two_kernel_blocks() -> None:
    """Id 3 of 8 tokens is the kernel blocks 6 and 7 of 4: the slots are those of one block of 8."""
    table = BlockTable(num_rows=1, max_blocks=2, block_size=4, blocks_per_id=2)
    table.add_row(0, np.array([3, 1], dtype=np.int32))
    assert table.cpu[0].tolist() == [6, 7, 2, 3]
    positions = np.array([0, 3, 4, 7, 8, 15])
    assert table.slots(np.zeros(6, dtype=np.int64), positions).tolist() == [24, 27, 28, 31, 8, 15]


def test_blocks_and_waste_of_five_lengths() -> None:
    manager = KVCacheManager(FULL, block_size=4, num_blocks=10)
    lengths = [1, 4, 5, 8, 9]
    blocks = [manager.blocks_for(length) for length in lengths]
    assert blocks == [1, 1, 2, 2, 3]
    assert [count * 4 - length for count, length in zip(blocks, lengths, strict=True)] == [3, 0, 3, 0, 3]


def test_eight_blocks_cannot_hold_them_and_the_refused_one_changes_nothing() -> None:
    manager = KVCacheManager(FULL, block_size=4, num_blocks=1 + 8)
    held = [request(f"{length}", length) for length in (1, 4, 5, 8)]
    for each in held:
        assert manager.allocate_slots(each, len(each.tokens)) is not None
    before = [block.block_id for block in manager.pool.free_queue]
    assert len(before) == 2
    refused = request("9", 9)
    assert manager.allocate_slots(refused, 9) is None
    assert [block.block_id for block in manager.pool.free_queue] == before
    assert refused.blocks == ()
    manager.check(held)


def ids(blocks: list) -> list[int]:
    """Counted from the first usable block: the null block does not count."""
    return [block.block_id - 1 for block in blocks]


def test_six_blocks_of_four_by_hand() -> None:
    manager = KVCacheManager(FULL, block_size=4, num_blocks=1 + 6, enable_caching=False)
    a, b, c, d = request("A", 6), request("B", 3), request("C", 5), request("D", 10)

    def free() -> list[int]:
        return ids(list(manager.pool.free_queue))

    manager.allocate_slots(a, 6)
    assert ids(a.blocks[0]) == [0, 1]
    manager.allocate_slots(b, 3)
    assert ids(b.blocks[0]) == [2]
    manager.free(b)
    assert free() == [3, 4, 5, 2]
    manager.allocate_slots(a, 6 + 3)
    assert ids(a.blocks[0]) == [0, 1, 3]
    manager.allocate_slots(c, 5)
    assert ids(c.blocks[0]) == [4, 5]
    manager.free(a)
    assert free() == [2, 0, 1, 3]
    manager.allocate_slots(d, 10)
    assert ids(d.blocks[0]) == [2, 0, 1]
    assert slots(ids(d.blocks[0]), 4, [9]) == [5]
    assert manager.allocate_slots(d, 10 + 100) is None
    assert ids(d.blocks[0]) == [2, 0, 1] and free() == [3]
    manager.check([c, d])


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "element_bytes", "expected"),
    [(30, 3, 64, 2, 23_040), (32, 8, 128, 2, 131_072), (1, 1, 1, 1, 2), (22, 4, 64, 4, 45_056)],
)
def test_bytes_of_a_slot(layers: int, heads: int, head_dim: int, element_bytes: int, expected: int) -> None:
    assert slot_bytes(layers, heads, head_dim, element_bytes) == expected


def test_no_slot_of_a_pool_of_more_than_two_to_the_31_wraps() -> None:
    table = BlockTable(num_rows=1, max_blocks=1, block_size=64)
    table.add_row(0, np.array([2**30], dtype=np.int32))
    assert table.slots(np.array([0]), np.array([63])).tolist() == [2**30 * 64 + 63]
