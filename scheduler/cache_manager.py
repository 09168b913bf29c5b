"""Block tables of one replica's requests over its one BlockPool: hits, growth, window fronts, publishing, freeing.

A request has one table per cache group (`request.blocks`), all of one length; null blocks stand in front of a window.
Pure: no sockets, no clock, no torch. Names after vLLM's KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import pack
from protocol.messages import KVCacheGroupSpec
from protocol.windows import first_live_block, most_live_blocks
from scheduler.block import KVCacheBlock
from scheduler.block_hash import cache_key, cache_keys, extend_chain, next_hash
from scheduler.block_pool import BlockPool
from scheduler.eviction_memory import EvictionMemory
from scheduler.request import Request


class PrefixHit(NamedTuple):
    """The longest cached prefix of a request. `blocks`: per group `num_blocks` table entries, not yet touched."""

    num_blocks: int
    blocks: tuple[list[KVCacheBlock], ...]


def blocks_to_revive(hit: PrefixHit) -> int:
    """Hit blocks that wait in the free queue: taking them lowers the free count just as new blocks do."""
    return sum(block.ref_cnt == 0 and not block.is_null for blocks in hit.blocks for block in blocks)


class KVCacheManager:
    """Who needs which blocks. `block_size` in tokens; `num_blocks` counts the null block."""

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        block_size: int,
        num_blocks: int,
        enable_caching: bool = True,
        evicted: EvictionMemory | None = None,
    ):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if not groups:
            raise ValueError("a model has at least one cache group")
        self.groups = groups
        self.windows = tuple(group.sliding_window for group in groups)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching, evicted)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Table length for `num_tokens`: ⌈n/B⌉."""
        return -(-num_tokens // self.block_size)

    def fits_empty_pool(self, num_tokens: int, num_blocks: int | None = None) -> bool:
        """Whether `num_tokens` can be held at once by a request that has the whole pool.

        `num_blocks`: of another pool than this manager's, the null block included.
        """
        need = sum(most_live_blocks(num_tokens, window, self.block_size) for window in self.windows)
        return need <= (self.pool.num_usable if num_blocks is None else num_blocks - 1)

    # ------------------------------------------------------------------------------------------------- prefix hits

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest length, in blocks, at which every group hits. Touches nothing.

        At most ⌊(n-1)/B⌋ blocks: the last token is computed in any case, to have logits. A window group needs just
        the blocks that the window of the first computed position sees; its entries before them are null.
        """
        empty = PrefixHit(0, tuple([] for _ in self.groups))
        most = (len(request.tokens) - 1) // self.block_size
        if request.prompt_logprobs_due:  # they take a computation of the token before each
            most = (request.num_prompt_logprobs - 1) // self.block_size
        if not self.pool.enable_caching or most < 1:
            return empty
        self.hash_blocks(request, most)
        found = [self._lookup(request.block_hashes[:most], group) for group in range(self.num_groups)]
        length = self._longest_common(found, most)
        if length == 0:
            return empty
        null, blocks = self.pool.null_block, []
        for window, hits in zip(self.windows, found, strict=True):
            front = self._front(length, window)
            live = [block for block in hits[front:length] if block is not None]
            assert len(live) == length - front
            blocks.append([null] * front + live)
        return PrefixHit(length, tuple(blocks))

    def hash_blocks(self, request: Request, num_blocks: int, tokens: NDArray[np.int32] | None = None) -> None:
        """Have the hashes of the first `num_blocks` full blocks of a request; none is computed twice.

        tokens: int32, where its tokens lie while a row holds it; None: `request.tokens`.
        """
        if len(request.block_hashes) < num_blocks:
            known = request.tokens if tokens is None else tokens
            first = len(request.block_hashes) * self.block_size
            following = pack(known[first : num_blocks * self.block_size])
            extend_chain(request.block_hashes, request.root, following, self.block_size)

    def _lookup(self, hashes: list[bytes], group: int) -> list[KVCacheBlock | None]:
        """Per block what the map holds. A full group stops at its first miss: nothing behind it can count."""
        found: list[KVCacheBlock | None] = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(cache_key(block_hash, group))
            if block is None and self.windows[group] == 0:
                break
            found.append(block)
        return found

    def _longest_common(self, found: list[list[KVCacheBlock | None]], most: int) -> int:
        length = min([most, *(len(hits) for hits in found)])
        changed = True
        while changed and length:
            changed = False
            for window, hits in zip(self.windows, found, strict=True):
                for index in range(length - 1, self._front(length, window) - 1, -1):
                    if hits[index] is None:  # every length beyond `index` needs it or something behind it
                        length, changed = index, True
                        break
        return length

    def _front(self, num_blocks: int, window: int) -> int:
        """First table entry that a request continuing after `num_blocks` full blocks still needs."""
        return first_live_block(num_blocks * self.block_size, window, self.block_size) if window else 0

    # ------------------------------------------------------------------------------------------------------ growth

    def blocks_to_admit(self, request: Request, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks it takes to admit `request` for its first `num_tokens` tokens: new ones and revived hits."""
        new = self.blocks_for(num_tokens) - hit.num_blocks
        return new * self.num_groups + blocks_to_revive(hit)

    def blocks_until_known(self, request: Request, num_tokens: int, hit: PrefixHit) -> int:
        """The same, but with all its known tokens in the full groups (what admission asks for)."""
        chunk = self.blocks_for(num_tokens) - hit.num_blocks
        whole = self.blocks_for(len(request.tokens)) - hit.num_blocks
        return sum(chunk if window else whole for window in self.windows) + blocks_to_revive(hit)

    def most_tokens_to_admit(self, request: Request, hit: PrefixHit) -> int:
        """Tokens behind the hit that `blocks_until_known` grants the whole free pool: the longest chunk; 0: none."""
        windows = sum(window != 0 for window in self.windows)
        whole = self.blocks_for(len(request.tokens)) - hit.num_blocks
        left = self.pool.num_free - blocks_to_revive(hit) - whole * (self.num_groups - windows)
        if left < 0:
            return 0
        blocks = min(whole, left // windows) if windows else whole
        return min(len(request.tokens), (hit.num_blocks + blocks) * self.block_size) - hit.num_blocks * self.block_size

    def allocate_slots(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None
    ) -> tuple[list[KVCacheBlock], ...] | None:
        """Give `request` slots for its first `num_tokens` tokens; returns the new blocks per group.

        With `hit` (admission) its table starts with the hit blocks. None when the pool cannot: nothing has changed.
        """
        hit = hit or PrefixHit(0, tuple([] for _ in self.groups))
        have = len(request.blocks[0]) if request.blocks else hit.num_blocks
        new = max(0, self.blocks_for(num_tokens) - have)
        need = new * self.num_groups if request.blocks else self.blocks_to_admit(request, num_tokens, hit)
        if need > self.pool.num_free:
            return None
        if not request.blocks:
            for blocks in hit.blocks:
                self.pool.touch(blocks)
            request.num_hit_blocks = hit.num_blocks
            request.blocks = tuple(list(blocks) for blocks in hit.blocks)
        self.grow((request,), (new,))
        return tuple(table[have:] for table in request.blocks)

    def grow(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]] | None:
        """Lengthen the tables of running requests: counts[i] blocks in every group for requests[i].

        Returns per group the new block ids, in the order of the requests; None when the pool cannot: nothing changed.
        """
        groups = self.num_groups
        need = sum(counts) * groups
        if need > self.pool.num_free:
            return None
        fresh = self.pool.get_new_blocks(need)
        given: list[list[KVCacheBlock]] = [[] for _ in range(groups)]
        if max(counts, default=0) <= 1 and len(fresh) == len(requests) * groups:  # steady decode: one for each
            for group in range(groups):
                given[group] = fresh[group::groups]
                for request, block in zip(requests, given[group], strict=True):
                    request.blocks[group].append(block)
        else:
            place = 0
            for request, count in zip(requests, counts, strict=True):
                for group, table in enumerate(request.blocks):
                    blocks = fresh[place : place + count]
                    table.extend(blocks)
                    given[group].extend(blocks)
                    place += count
        return [[block.block_id for block in blocks] for blocks in given]

    # ---------------------------------------------------------------------------------- window fronts, publish, free

    def drop_fronts(
        self, requests: Sequence[Request], group: int, fronts: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Null the entries of a window group before index fronts[i] in the tables of requests[i]; free their blocks.

        Returns three lists of one length, an element for each entry that became null: the place of its request in
        `requests`, its index, and the block id that it held.
        """
        null = self.pool.null_block
        places, entries, dropped = list[int](), list[int](), list[KVCacheBlock]()
        for place, (request, front) in enumerate(zip(requests, fronts, strict=True)):
            table = request.blocks[group]
            for index in range(front - 1, -1, -1):
                block = table[index]
                if block.is_null:
                    break  # what lies before went earlier
                table[index] = null
                places.append(place)
                entries.append(index)
                dropped.append(block)
        self.pool.free_blocks(dropped)
        return places, entries, [block.block_id for block in dropped]

    def publish(self, request: Request, first: int, end: int) -> None:
        """Let lookups find the blocks [first, end) of `request`, whose hashes are known."""
        hashes = request.block_hashes[first:end]
        for group, table in enumerate(request.blocks):
            self.pool.cache_full_blocks(table[first:end], cache_keys(hashes, group))

    def publish_next(self, requests: Sequence[Request], indices: Sequence[int], tokens: bytes) -> None:
        """Hash and publish block indices[i] of requests[i], the first of it that is not published.

        tokens: int32 little-endian, those of all these blocks one after the other.
        """
        step, start, named = 4 * self.block_size, 0, list[bytes]()
        for request, index in zip(requests, indices, strict=True):
            hashes = request.block_hashes
            if len(hashes) == index:
                hashes.append(next_hash(hashes[-1] if hashes else request.root, tokens[start : start + step]))
            named.append(hashes[index])
            start += step
        for group in range(self.num_groups):
            blocks = [request.blocks[group][index] for request, index in zip(requests, indices, strict=True)]
            self.pool.cache_full_blocks(blocks, cache_keys(named, group))

    def unpublish(self, request: Request) -> None:
        """Let nobody find what `request` computed itself (its results turned out to be worthless)."""
        for block_hash in request.block_hashes[request.num_hit_blocks :]:
            for group in range(self.num_groups):
                block = self.pool.get_cached_block(cache_key(block_hash, group))
                if block is not None:
                    self.pool.evict(block, "withdrawn")

    def free(self, request: Request) -> None:
        """Give all its blocks back: the last positions first, groups interleaved, so heads of prefixes live longest.

        With caching off in the order of the table.
        """
        columns: Iterable[tuple[KVCacheBlock, ...]] = zip(*request.blocks, strict=True)
        if self.pool.enable_caching:
            columns = reversed(list(columns))
        self.pool.free_blocks(block for column in columns for block in column)
        request.blocks = ()

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless ref counts equal the table entries of `requests` (all that hold blocks)."""
        self.pool.check()
        counts = [0] * len(self.pool.blocks)
        for request in requests:
            assert len(request.blocks) == self.num_groups, request.request_id
            assert len({len(table) for table in request.blocks}) == 1, request.request_id
            for window, table in zip(self.windows, request.blocks, strict=True):
                live = [block.is_null for block in table]
                assert window or not any(live), f"{request.request_id}: null block in a full-attention table"
                assert live == sorted(live, reverse=True), f"{request.request_id}: null block behind a live one"
                for block in table:
                    counts[block.block_id] += not block.is_null
        for block in self.pool.blocks:
            assert block.ref_cnt == counts[block.block_id], f"{block} is named by {counts[block.block_id]} entries"
