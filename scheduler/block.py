"""One KV cache block's books, and the queue of free ones. The keys and values themselves lie in the worker."""

from __future__ import annotations

from collections.abc import Iterator


class KVCacheBlock:
    """`block_id` indexes the block axis of the workers' KV cache; `ref_cnt` counts the table entries that name it.

    ref_cnt > 0: in use. ref_cnt == 0: in the free queue; with a hash it is still a prefix hit, until it is handed out.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """Cache identity (`block_hash.cache_key`: chained hash and cache group); None: not in the prefix map."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None
        self.is_null = False

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={name})"


class FreeKVCacheBlockQueue:
    """Free blocks, next to be reused first: a doubly linked list through the blocks themselves.

    Both ends and the middle in O(1): a prefix hit takes a block out from wherever it waits.
    """

    def __init__(self) -> None:
        self._front = KVCacheBlock(-1)  # sentinels: a linked block always has two neighbours
        self._back = KVCacheBlock(-1)
        self._front.next_free = self._back
        self._back.prev_free = self._front
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._front.next_free
        while block is not self._back:
            assert block is not None
            yield block
            block = block.next_free

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the n blocks to be reused next, in that order. Raises IndexError, and takes none, if there are fewer."""
        if n > self._length:
            raise IndexError(f"{n} free blocks wanted, {self._length} there")
        taken = []
        block = self._front.next_free
        for _ in range(n):
            assert block is not None
            taken.append(block)
            after = block.next_free
            block.prev_free = block.next_free = None
            block = after
        assert block is not None
        self._front.next_free = block
        block.prev_free = self._front
        self._length -= n
        return taken

    def append(self, block: KVCacheBlock) -> None:
        """To be reused last."""
        before = self._back.prev_free
        assert before is not None
        self._link(before, block, self._back)

    def appendleft(self, block: KVCacheBlock) -> None:
        """To be reused next."""
        after = self._front.next_free
        assert after is not None
        self._link(self._front, block, after)

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out, wherever it stands. It must be in this queue."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not queued"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.prev_free is None and block.next_free is None, f"{block} is queued already"
        before.next_free = block
        block.prev_free = before
        block.next_free = after
        after.prev_free = block
        self._length += 1

    def check(self) -> None:
        """Raise AssertionError if a link is broken or the length is off."""
        count, block = 0, self._front
        while block.next_free is not None:
            assert block.next_free.prev_free is block, f"broken link behind {block}"
            block = block.next_free
            count += 1
        assert block is self._back and count == self._length + 1, (count, self._length)
