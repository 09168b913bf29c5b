"""A random user of BlockPool and KVCacheManager against plain models, books checked after every operation.

The world is tiny (two token values, few blocks), so that contents meet and pools run dry all the time.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.arrays import pack
from protocol.messages import KVCacheGroupSpec, SamplingParams
from protocol.windows import first_live_block
from scheduler.block import KVCacheBlock
from scheduler.block_hash import root_hash
from scheduler.block_pool import BlockPool, OutOfBlocks
from scheduler.cache_manager import KVCacheManager
from scheduler.request import Request

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list of free ids in order, a dict of owners and a dict of what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(2)
        self.free: list[int] = []
        self.owners: dict[int, int] = {}
        self.found: dict[bytes, int] = {}

    @initialize(num_blocks=st.integers(2, 8), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, caching)
        self.free = list(range(1, num_blocks))

    def _hash_of(self, block_id: int) -> bytes | None:
        return next((key for key, other in self.found.items() if other == block_id), None)

    @rule(n=st.integers(0, 9))
    def get(self, n: int) -> None:
        if n > len(self.free):
            try:
                self.pool.get_new_blocks(n)
            except OutOfBlocks:
                return
            raise AssertionError("blocks out of nowhere")
        expected, self.free = self.free[:n], self.free[n:]
        assert [block.block_id for block in self.pool.get_new_blocks(n)] == expected
        for block_id in expected:
            self.owners[block_id] = 1
            self.found = {key: other for key, other in self.found.items() if other != block_id}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True, max_size=4))
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in chosen])
        for block_id in chosen:
            self.owners[block_id] -= 1
            if self.owners[block_id] == 0:
                del self.owners[block_id]
                if self.pool.enable_caching and self._hash_of(block_id) is None:
                    self.free.insert(0, block_id)
                else:
                    self.free.append(block_id)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), key=KEYS)
    def cache(self, data: st.DataObject, key: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.owners)))
        wins = self.pool.enable_caching and key not in self.found and self._hash_of(block_id) is None
        assert self.pool.cache_full_block(self.pool.blocks[block_id], key) == wins
        if wins:
            self.found[key] = block_id

    @rule(key=KEYS)
    def look_up_and_touch(self, key: bytes) -> None:
        block = self.pool.get_cached_block(key)
        assert (block.block_id if block else None) == self.found.get(key)
        if block is not None:
            self.pool.touch([block])
            self.owners[block.block_id] = self.owners.get(block.block_id, 0) + 1
            if block.block_id in self.free:
                self.free.remove(block.block_id)

    @rule(key=KEYS)
    def evict(self, key: bytes) -> None:
        block = self.pool.get_cached_block(key)
        if block is not None:
            self.pool.evict(block)
            del self.found[key]

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [block.block_id for block in self.pool.free_queue] == self.free
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt} == self.owners
        assert self.pool.num_cached == len(self.found)


def naive_hit(manager: KVCacheManager, request: Request) -> int:
    """The longest hit in blocks by trying every length from the longest down: no cleverness."""
    size = manager.block_size
    for length in range((len(request.tokens) - 1) // size, 0, -1):
        for group, window in enumerate(manager.windows):
            start = first_live_block(length * size, window, size) if window else 0
            keys = [request.block_hashes[index] + bytes([group]) for index in range(start, length)]
            if any(manager.pool.get_cached_block(key) is None for key in keys):
                break
        else:
            return length
    return 0


class ManagerMachine(RuleBasedStateMachine):
    """The manager against a memory of what every block was last filled with.

    `contents[group][block_id]`: the tokens up to and with the block, once published. Whatever a lookup finds must hold
    just the prefix it is found for.
    """

    running: Bundle[Request] = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager((_group(0),), 1, 2)
        self.requests: list[Request] = []
        self.computed: dict[str, int] = {}
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}
        self.count = 0

    @initialize(
        windows=st.sampled_from([(0,), (3,), (0, 1), (0, 3), (0, 4), (2, 5), (0, 2, 5)]),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 24),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, windows: tuple[int, ...], block_size: int, num_blocks: int, caching: bool) -> None:
        groups = tuple(_group(window) for window in windows)
        self.manager = KVCacheManager(groups, block_size, num_blocks, caching)

    @rule(
        target=running,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        chunk=st.integers(1, 14),
    )
    def admit(self, tokens: list[int], chunk: int) -> Request | MultipleResults[Request]:
        manager, size = self.manager, self.manager.block_size
        request = Request(
            f"r{self.count}",
            np.array(tokens, dtype=np.int32),
            SamplingParams(),
            limit=10_000,
            stop_ids=(),
            root=root_hash(b"k"),
            arrival=self.count,
        )
        self.count += 1
        hit = manager.get_computed_blocks(request)
        if manager.pool.enable_caching:
            manager.hash_blocks(request, (len(tokens) - 1) // size)
            assert hit.num_blocks == naive_hit(manager, request)
        else:
            assert hit.num_blocks == 0
        assert hit.num_blocks * size <= (len(tokens) - 1) // size * size
        self._the_hit_holds_its_prefix(hit.blocks, tokens)
        end = min(len(tokens), hit.num_blocks * size + chunk)
        free_before = [block.block_id for block in manager.pool.free_queue]
        distinct = {b.block_id for blocks in hit.blocks for b in blocks if b.ref_cnt == 0 and not b.is_null}
        need = (-(-end // size) - hit.num_blocks) * manager.num_groups + len(distinct)
        assert manager.blocks_to_admit(request, end, hit) == need
        new = manager.allocate_slots(request, end, hit)
        if need > len(free_before):
            assert new is None and request.blocks == ()
            assert [block.block_id for block in manager.pool.free_queue] == free_before
            return multiple()
        assert new is not None
        self.requests.append(request)
        self._taken(new)
        assert len(manager.pool.free_queue) == len(free_before) - need
        self.computed[request.request_id] = end
        self._publish(request, hit.num_blocks)
        return request

    @rule(request=running, more=st.integers(1, 6), token=st.integers(0, 1))
    def grow(self, request: Request, more: int, token: int) -> None:
        if request not in self.requests:
            return
        manager, size = self.manager, self.manager.block_size
        start = self.computed[request.request_id]
        if start + more > len(request.tokens):
            request.tokens = np.append(request.tokens, np.full(start + more - len(request.tokens), token, np.int32))
        for group, window in enumerate(manager.windows):
            if window:
                front = first_live_block(start, window, size)
                _, entries, ids = manager.drop_fronts([request], group, [front])
                assert all(entry < front for entry in entries) and manager.pool.null_block.block_id not in ids
        free_before = [block.block_id for block in manager.pool.free_queue]
        have = [[block.block_id for block in table] for table in request.blocks]
        new = manager.allocate_slots(request, start + more)
        wanted = (-(-(start + more) // size) - len(have[0])) * manager.num_groups
        if wanted > len(free_before):
            assert new is None
            assert [block.block_id for block in manager.pool.free_queue] == free_before
            assert [[block.block_id for block in table] for table in request.blocks] == have
            return
        assert new is not None and sum(map(len, new)) == max(0, wanted)
        self._taken(new)
        for table, old in zip(request.blocks, have, strict=True):
            assert [block.block_id for block in table[: len(old)]] == old, "tables are append-only"
        self.computed[request.request_id] = start + more
        self._publish(request, start // size)

    @rule(request=consumes(running), failed=st.sampled_from([False, False, False, True]))
    def free(self, request: Request, failed: bool) -> None:
        if request not in self.requests:
            return
        manager = self.manager
        self.requests.remove(request)
        manager.free(request)
        assert request.blocks == ()
        if failed:
            manager.unpublish(request)
            for block_hash in request.block_hashes[request.num_hit_blocks :]:
                for group in range(manager.num_groups):
                    assert manager.pool.get_cached_block(block_hash + bytes([group])) is None

    def _taken(self, new: tuple[list[KVCacheBlock], ...]) -> None:
        """Handed-out blocks are about to be overwritten: nothing may find them any more."""
        for blocks in new:
            for block in blocks:
                assert block.block_hash is None and block.ref_cnt == 1 and not block.is_null
                for other in range(self.manager.num_groups):
                    self.contents.pop((other, block.block_id), None)

    def _publish(self, request: Request, first: int) -> None:
        manager, size = self.manager, self.manager.block_size
        end = self.computed[request.request_id] // size
        if not manager.pool.enable_caching or end <= first:
            return
        if end == first + 1:  # as in steady decode
            manager.publish_next([request], [first], pack(request.tokens[first * size : end * size]))
        else:
            manager.hash_blocks(request, end)
            manager.publish(request, first, end)
        for group, table in enumerate(request.blocks):
            for index in range(first, end):
                if table[index].block_hash is not None:
                    prefix = tuple(request.tokens[: (index + 1) * size].tolist())
                    self.contents.setdefault((group, table[index].block_id), prefix)

    def _the_hit_holds_its_prefix(self, blocks: tuple[list[KVCacheBlock], ...], tokens: list[int]) -> None:
        size = self.manager.block_size
        for group, table in enumerate(blocks):
            for index, block in enumerate(table):
                if not block.is_null:
                    assert self.contents[group, block.block_id] == tuple(tokens[: (index + 1) * size])

    @invariant()
    def books_balance(self) -> None:
        self.manager.check(self.requests)

    def teardown(self) -> None:
        for request in self.requests:
            self.manager.free(request)
        assert self.manager.pool.num_free == self.manager.pool.num_usable
        self.manager.check([])


def _group(window: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(sliding_window=window, layer_ids=(0,), num_kv_heads=1, head_dim=1)


MANY = settings(
    max_examples=300,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_pool_agrees_with_a_plain_model_after_every_operation() -> None:
    run_state_machine_as_test(PoolMachine, settings=MANY)


def test_the_cache_manager_agrees_with_a_plain_model_after_every_operation() -> None:
    run_state_machine_as_test(ManagerMachine, settings=MANY)
