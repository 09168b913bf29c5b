"""Where a window begins, and what of a table may go, against a mask written out."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.messages import KVCacheGroupSpec, SamplingParams
from protocol.windows import first_live_block, most_live_blocks
from scheduler.cache_manager import KVCacheManager
from scheduler.request import Request


def seen(position: int, window: int) -> list[int]:
    """Key positions that a query sees, itself included."""
    return [key for key in range(position + 1) if position - key < window]


@pytest.mark.parametrize("window", range(1, 10))
@pytest.mark.parametrize("block_size", range(1, 9))
def test_the_front_is_the_first_block_with_a_key_that_is_seen(window: int, block_size: int) -> None:
    positions = np.arange(41)
    fronts = first_live_block(positions, window, block_size)
    for position in positions.tolist():
        expected = min(seen(position, window)) // block_size
        assert first_live_block(position, window, block_size) == expected == fronts[position]


def test_window_four_in_blocks_of_four_at_position_eight() -> None:
    assert first_live_block(8, 4, 4) == 1


@pytest.mark.parametrize("window", range(10))
@pytest.mark.parametrize("block_size", range(1, 9))
def test_no_decode_step_needs_more_than_the_most_live_blocks(window: int, block_size: int) -> None:
    for length in range(1, 41):
        keys = seen(length - 1, window) if window else list(range(length))
        live = len({key // block_size for key in keys})
        assert live <= most_live_blocks(length, window, block_size) <= -(-length // block_size)


def test_dropping_a_front_frees_just_the_blocks_before_it() -> None:
    group = KVCacheGroupSpec(sliding_window=4, layer_ids=(0,), num_kv_heads=1, head_dim=1)
    manager = KVCacheManager((group,), block_size=4, num_blocks=8, enable_caching=False)
    request = Request("r", np.arange(16, dtype=np.int32), SamplingParams(), limit=99, stop_ids=(), root=b"", arrival=0)
    manager.allocate_slots(request, 16)
    dropped = manager.drop_fronts([request], 0, [first_live_block(12, 4, 4)])
    assert dropped == ([0, 0], [1, 0], [2, 1])  # places in the list of requests, entries, block ids
    assert [block.block_id for block in request.blocks[0]] == [0, 0, 3, 4]
    assert manager.drop_fronts([request], 0, [2]) == ([], [], [])
    manager.check([request])
