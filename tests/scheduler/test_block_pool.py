"""The pool: who gets which block next, what a lookup finds, and that its books always balance."""

from __future__ import annotations

import pytest

from scheduler.block import FreeKVCacheBlockQueue, KVCacheBlock
from scheduler.block_pool import BlockPool, OutOfBlocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=7)


def free_ids(pool: BlockPool) -> list[int]:
    pool.check()
    return [block.block_id for block in pool.free_queue]


def test_the_null_block_is_never_handed_out(pool: BlockPool) -> None:
    assert [block.block_id for block in pool.get_new_blocks(6)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)


def test_too_many_blocks_are_refused_and_nothing_changes(pool: BlockPool) -> None:
    pool.get_new_blocks(2)
    with pytest.raises(OutOfBlocks, match="need 5 blocks, 4 free"):
        pool.get_new_blocks(5)
    assert free_ids(pool) == [3, 4, 5, 6]


def test_null_blocks_are_passed_over_when_touched_freed_or_cached(pool: BlockPool) -> None:
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, pool.null_block])
    assert not pool.cache_full_block(pool.null_block, b"key")
    assert free_ids(pool) == [1, 2, 3, 4, 5, 6] and pool.get_cached_block(b"key") is None


def test_a_double_free_is_an_error_at_once(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="double free"):
        pool.free_blocks([block])
    assert free_ids(pool) == [1, 2, 3, 4, 5, 6]


def test_a_block_named_twice_in_one_free_is_a_double_free(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="double free"):
        pool.free_blocks([block, block])


def test_a_shared_block_is_free_only_after_its_last_owner(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert block.ref_cnt == 1 and block.block_id not in free_ids(pool)
    pool.free_blocks([block])
    assert block.block_id in free_ids(pool)


def test_worthless_blocks_are_reused_before_cached_ones(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(4)
    pool.cache_full_block(blocks[0], b"a")
    pool.cache_full_block(blocks[2], b"c")
    pool.free_blocks(blocks)
    assert free_ids(pool) == [4, 2, 5, 6, 1, 3]


def test_without_caching_the_first_freed_is_the_first_reused() -> None:
    pool = BlockPool(num_blocks=7, enable_caching=False)
    blocks = pool.get_new_blocks(4)
    assert not pool.cache_full_block(blocks[0], b"a")
    pool.free_blocks([blocks[2], blocks[0]])
    assert free_ids(pool) == [5, 6, 3, 1]


def test_a_free_block_is_found_until_it_is_handed_out(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, b"a")
    pool.free_blocks([block])
    assert pool.get_cached_block(b"a") is block
    pool.get_new_blocks(6)
    assert pool.get_cached_block(b"a") is None and block.block_hash is None


def test_a_revived_block_leaves_the_free_queue(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, b"a")
    pool.free_blocks([block])
    pool.touch([block])
    assert free_ids(pool) == [2, 3, 4, 5, 6] and block.ref_cnt == 1


def test_the_first_block_of_a_content_stays_the_one_found(pool: BlockPool) -> None:
    first, second = pool.get_new_blocks(2)
    assert pool.cache_full_block(first, b"a")
    assert not pool.cache_full_block(second, b"a")
    assert second.block_hash is None and pool.get_cached_block(b"a") is first


def test_evicting_the_second_of_two_twins_leaves_the_first_to_be_found(pool: BlockPool) -> None:
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first, second], [b"a", b"a"])
    pool.free_blocks([second])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"a") is first
    pool.free_blocks([first])
    pool.get_new_blocks(5)
    assert pool.get_cached_block(b"a") is None
    pool.check()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(num_blocks=1)


def test_the_queue_takes_from_both_ends_and_the_middle() -> None:
    queue = FreeKVCacheBlockQueue()
    blocks = [KVCacheBlock(i) for i in range(5)]
    for block in blocks[:4]:
        queue.append(block)
    queue.appendleft(blocks[4])
    queue.remove(blocks[1])
    queue.check()
    assert [block.block_id for block in queue] == [4, 0, 2, 3]
    assert [queue.popleft_n(1)[0].block_id for _ in range(4)] == [4, 0, 2, 3]
    with pytest.raises(IndexError):
        queue.popleft_n(1)


def test_a_block_cannot_be_queued_twice_nor_removed_unqueued() -> None:
    queue = FreeKVCacheBlockQueue()
    block = KVCacheBlock(1)
    queue.append(block)
    with pytest.raises(AssertionError, match="queued already"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(AssertionError, match="not queued"):
        queue.remove(block)
    queue.check()


def test_check_sees_a_leaked_block(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt = 0
    with pytest.raises(AssertionError, match="without owner"):
        pool.check()


def test_check_sees_a_map_entry_with_another_hash(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, b"a")
    block.block_hash = b"b"
    with pytest.raises(AssertionError, match="does not bear"):
        pool.check()
