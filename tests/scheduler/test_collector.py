"""The collector passes over the blocks of a pool that serves, and takes those of one that is gone."""

from __future__ import annotations

import gc

from scheduler.block import KVCacheBlock
from scheduler.block_pool import BlockPool
from scheduler.collector import leave_out_what_is_there


def visited() -> int:
    """Blocks that a full collection would look at."""
    return sum(type(each) is KVCacheBlock for each in gc.get_objects())


def test_a_pool_is_left_out_until_it_is_gone() -> None:
    gc.unfreeze()
    gc.collect()  # the pools of other tests, which would otherwise come and go in the midst of this one
    before = visited()
    try:
        pool = BlockPool(1000)
        assert visited() >= before + 1000
        leave_out_what_is_there()
        assert visited() == 0
        pool = BlockPool(10)
        leave_out_what_is_there()
        gc.unfreeze()
        assert visited() <= before + len(pool.blocks) + 2, "nothing is left of the first pool but its successor"
    finally:
        gc.unfreeze()
