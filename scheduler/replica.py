"""One replica: the unit of KV. Its epoch, pool, rows, digest and the steps its worker still owes a result for."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import pack
from protocol.digest import TableDigest
from protocol.messages import KVCacheGroupSpec, SchedulerOutput
from scheduler.batch import RowBatch
from scheduler.cache_manager import KVCacheManager
from scheduler.eviction_memory import EvictionMemory
from scheduler.metrics import ReplicaStats
from scheduler.request import Request
from scheduler.rest import Work
from scheduler.step_budget import StepCosts
from scheduler.step_log import StepLog

FLIGHT_RECORDER_PLANS = 1000


class Step(NamedTuple):
    """A plan in flight and what its result will mean: row rows[i] samples the token of index token_index[i] for the
    admission binding[i]."""

    step: int
    rows: NDArray[np.int64]
    token_index: NDArray[np.int64]
    binding: NDArray[np.int64]
    digest: int
    num_tokens: int
    sent_at: float
    reporting: dict[int, Request]
    """By row: requests of which it computes prompt tokens whose log-probabilities their clients still wait for."""
    long_prompt: bool
    """Whether it computes a chunk of one."""


class Replica:
    """Scheduler state of one replica. `ready` while a worker serves its current epoch."""

    def __init__(
        self,
        index: int,
        groups: tuple[KVCacheGroupSpec, ...],
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_caching: bool,
    ):
        self.index = index
        self.groups = groups
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.epoch = 0
        self.ready = False
        self.stats = ReplicaStats()
        self.step_log = StepLog()
        self.costs = StepCosts()
        self.evicted = EvictionMemory()
        """Survives epochs, as the counters do."""
        self.num_blocks = 0
        self.pool_size: int | None = None
        """Blocks of its latest worker, alive or not: what the next one is expected to bring; None: it had none yet."""
        self._empty(num_blocks=2)

    def _empty(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.manager = KVCacheManager(self.groups, self.block_size, num_blocks, self.enable_caching, self.evicted)
        self.rows = RowBatch(self.max_num_seqs, self.max_model_len, len(self.groups), self.block_size)
        self.digest = TableDigest(self.max_num_seqs)
        self.in_flight: deque[Step] = deque()
        self.loose: dict[int, Request] = {}
        """By binding: requests without a row that tokens in flight may still reach (draining or preempted)."""
        self.helped = False
        """Whether other replicas rest now for the sake of its prompts."""
        self.next_step = 0
        self.recorder: deque[SchedulerOutput] = deque(maxlen=FLIGHT_RECORDER_PLANS)

    @property
    def work(self) -> Work:
        """What it does, by the steps in flight. A prompt that is not done has a chunk in each."""
        long_prompt = any(step.long_prompt for step in self.in_flight)
        prompts = any(step.num_tokens > len(step.rows) for step in self.in_flight)  # what decodes samples
        return Work(long_prompt, prompts, len(self.in_flight[-1].rows) if self.in_flight else 0)

    def start(self, num_blocks: int) -> None:
        """A worker with empty memory of `num_blocks` serves the current epoch."""
        self._empty(num_blocks)
        self.pool_size = num_blocks
        self.ready = True

    def could_hold(self, num_tokens: int) -> bool:
        """Whether its pool, or the one it had before its worker died, can hold a request of `num_tokens` alone."""
        return self.manager.fits_empty_pool(num_tokens, self.pool_size)

    def lose(self) -> list[Request]:
        """The worker is gone: everything in flight is void, pool and map are emptied, the epoch rises.

        Returns the unfinished requests that were bound here, without blocks, at their committed state.
        """
        bound = bound_requests(self)
        for request in self.rows.running():
            assert request.row is not None
            self.rows.unbind(request.row)
        for request in bound:
            request.blocks = ()
            request.in_flight = 0
            request.void_reason = None
        self.manager.pool.remember_lost()
        self.epoch += 1
        self.ready = False
        self._empty(num_blocks=2)
        return bound

    def release(self, row: int) -> Request:
        """Take the request out of its row and its blocks back into the pool, published first as far as they are sure.

        Its tokens in flight, if any, still find it through `loose`; the caller moves its state.
        """
        request = self.rows.requests[row]
        assert request is not None
        publish_row(self, row)
        binding = request.binding
        self.rows.unbind(row)
        self.manager.free(request)
        self.digest.clear_row(row)
        self.rows.to_finish.append(row)
        if request.in_flight:
            self.loose[binding] = request
        return request

    def check(self) -> None:
        """Raise AssertionError if an invariant of this replica is broken."""
        self.rows.check()
        self.manager.check(self.rows.running())
        for binding, request in self.loose.items():
            assert request.binding == binding and request.row is None and request.in_flight > 0, request.request_id


def bound_requests(replica: Replica) -> list[Request]:
    """Every unfinished request that depends on this replica: running, draining, or waiting for a late token."""
    return replica.rows.running() + list(replica.loose.values())


def publish_limit(committed: NDArray[np.int64], planned: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens whose blocks may be found: known to us *and* computed by an issued plan."""
    return np.minimum(committed, planned)


def publish_rows(replica: Replica) -> None:
    """Publish the blocks, of all rows, that are full and sure by now and were not before."""
    if not replica.enable_caching:
        return
    rows, size = replica.rows, replica.block_size
    unpublished = publish_limit(rows.committed, rows.planned) - rows.published
    due = np.nonzero(unpublished >= size)[0]
    if not len(due):
        return
    if int(unpublished[due].max()) >= 2 * size:  # prefill
        for row in due.tolist():
            publish_row(replica, row)
        return
    blocks = rows.published[due] // size
    rows.published[due] += size
    tokens = rows.token_blocks[due, blocks]
    replica.manager.publish_next(rows.requests_of(due), blocks.tolist(), pack(tokens))


def publish_row(replica: Replica, row: int) -> None:
    """The same for one row."""
    rows, size = replica.rows, replica.block_size
    first = int(rows.published[row]) // size
    end = int(publish_limit(rows.committed[row : row + 1], rows.planned[row : row + 1])[0]) // size
    if not replica.enable_caching or end <= first:
        return
    request = rows.requests[row]
    assert request is not None, f"row {row} is not in use"
    rows.published[row] = end * size
    replica.manager.hash_blocks(request, end, rows.token_ids[row])
    replica.manager.publish(request, first, end)
