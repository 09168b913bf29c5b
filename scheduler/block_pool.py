"""Who holds each KV cache block of one replica, and which content can be found in it. Pure: no sockets, no clock.

A block is null (id 0: stands for "no block here"), in use (ref_cnt >= 1) or free (in the free queue, next to be reused
first). A free block keeps its hash, so a prefix hit can revive it, until it is handed out.
Source: Kwon et al. 2023, PagedAttention, section 4; names after vLLM's BlockPool.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from protocol.messages import BLOCK_STATES
from scheduler.block import FreeKVCacheBlockQueue, KVCacheBlock
from scheduler.eviction_memory import Departure, EvictionMemory

NULL, FREE, CACHED, USED, SHARED = range(len(BLOCK_STATES))


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. Nothing was changed; the caller may preempt."""


class BlockPool:
    """All blocks of one replica's KV memory.

    `num_blocks` counts the null block. With `enable_caching` off no block is ever hashed and freed blocks are
    reused first in, first out. `evicted` is told what leaves the map; None: a memory of its own.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, evicted: EvictionMemory | None = None):
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.enable_caching = enable_caching
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue()
        for block in self.blocks[1:]:
            self.free_queue.append(block)
        self._cached: dict[bytes, KVCacheBlock] = {}
        self.evicted = EvictionMemory() if evicted is None else evicted
        self.states = bytearray([NULL, *[FREE] * (num_blocks - 1)])
        """By block id, its place in BLOCK_STATES: what a snapshot copies, so that it never walks the blocks."""
        self.now = 0.0
        """Time as whoever uses the pool tells it."""
        self.changed_at = array("d", bytes(8 * num_blocks))
        """By block id: `now` when it was handed out, touched, freed or evicted last; 0: never."""

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self.blocks) - 1

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find, in use or not."""
        return len(self._cached)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Hand out n distinct free blocks, each with ref_cnt 1; what they cached is forgotten. All or nothing.

        Raises OutOfBlocks and leaves the pool as it was.
        """
        if n > len(self.free_queue):
            raise OutOfBlocks(f"need {n} blocks, {len(self.free_queue)} free")
        taken = self.free_queue.popleft_n(n)
        states, changed_at, now = self.states, self.changed_at, self.now
        for block in taken:
            if block.block_hash is not None:
                self.evict(block)  # its content is about to be overwritten
            block.ref_cnt = 1
            states[block.block_id] = USED
            changed_at[block.block_id] = now
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more owner for each block; a free one leaves the free queue. Null blocks are passed over."""
        states, changed_at, now = self.states, self.changed_at, self.now
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1
            states[block.block_id] = USED if block.ref_cnt == 1 else SHARED
            changed_at[block.block_id] = now

    def free_blocks(self, ordered: Iterable[KVCacheBlock]) -> None:
        """One owner less for each block. Those without owner become free, to be reused in the order given.

        With caching on, blocks without a hash go to the head of the queue: nothing is lost by reusing them first.
        Null blocks are passed over.
        """
        states, changed_at, now = self.states, self.changed_at, self.now
        for block in ordered:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"double free of {block}"
            block.ref_cnt -= 1
            changed_at[block.block_id] = now
            if block.ref_cnt:
                states[block.block_id] = USED if block.ref_cnt == 1 else SHARED
                continue
            states[block.block_id] = FREE if block.block_hash is None else CACHED
            if self.enable_caching and block.block_hash is None:
                self.free_queue.appendleft(block)
            else:
                self.free_queue.append(block)

    def cache_full_block(self, block: KVCacheBlock, key: bytes) -> bool:
        """Let lookups of `key` find `block`. If another block has that content already, it stays the one found.

        Returns whether the map names this block now because of that.
        """
        return self.cache_full_blocks((block,), (key,)) == 1

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Sequence[bytes]) -> int:
        """`cache_full_block` for each pair; returns for how many it was true."""
        if not self.enable_caching:
            return 0
        cached, before = self._cached, len(self._cached)
        for block, key in zip(blocks, keys, strict=True):
            if block.block_hash is None and not block.is_null and cached.setdefault(key, block) is block:
                block.block_hash = key
                if block.ref_cnt == 0:
                    self.states[block.block_id] = CACHED
        return len(cached) - before

    def remember_lost(self) -> None:
        """The memory behind the blocks is gone, and this pool with it: nothing it holds will be found."""
        self.evicted.add_all(self._cached, len(self._cached), "lost")

    def get_cached_block(self, key: bytes) -> KVCacheBlock | None:
        """The block that holds this content, if one does. It is not touched."""
        return self._cached.get(key)

    def evict(self, block: KVCacheBlock, why: Departure = "evicted") -> None:
        """Make `block` unfindable, in use or free. Only the map entry that names this very block goes."""
        key = block.block_hash
        if key is None:
            return
        if self._cached.get(key) is block:
            del self._cached[key]
            self.evicted.add(key, why)
        block.block_hash = None
        if block.ref_cnt == 0:
            self.states[block.block_id] = FREE
            self.changed_at[block.block_id] = self.now

    def check(self) -> None:
        """Raise AssertionError if the books disagree with each other."""
        self.free_queue.check()
        queued = [block.block_id for block in self.free_queue]
        idle = [block.block_id for block in self.blocks if block.ref_cnt == 0 and not block.is_null]
        assert sorted(queued) == idle, f"free queue {sorted(queued)} differs from blocks without owner {idle}"
        null = self.null_block
        assert null.is_null and null.ref_cnt == 0 and null.block_hash is None and null.next_free is None, null
        for key, block in self._cached.items():
            assert block.block_hash == key, f"the map names {block} by a hash it does not bear"
        hashed = sum(block.block_hash is not None for block in self.blocks)
        assert hashed == len(self._cached), f"{hashed} blocks bear a hash, the map has {len(self._cached)}"
        assert self.states == bytes(map(_state_of, self.blocks)), "a state byte is out of date"
        in_use = sum(block.ref_cnt > 0 for block in self.blocks)
        assert len(queued) + in_use + 1 == len(self.blocks), (len(queued), in_use, len(self.blocks))


def _state_of(block: KVCacheBlock) -> int:
    if block.ref_cnt:
        return USED if block.ref_cnt == 1 else SHARED
    if block.is_null:
        return NULL
    return FREE if block.block_hash is None else CACHED
