"""One step of one replica: which rows run how many tokens, which blocks they get, who is preempted, who is admitted.

A plan is made in this order, and the order matters (docs/architecture.md): rows at their limit leave; window fronts;
*count* the needs of all running rows; choose victims until they fit; only then allocate and advance; publish; admit,
each admission publishing at once. Admissions never preempt, and a plan that preempted admits nobody. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.arrays import pack
from protocol.messages import FinishReason, NewRequestData, SamplingParams, SchedulerOutput
from protocol.windows import first_live_block
from scheduler.batch import I64, RowBatch
from scheduler.cache_manager import PrefixHit
from scheduler.queue import MAX_OVERTAKEN, RequestQueue
from scheduler.replica import Replica, Step, publish_rows
from scheduler.request import Request, RequestState
from scheduler.router import Router


class Plan(NamedTuple):
    """`output`: to be sent now, or None when no row runs. `ended`: requests that ended in the making;
    `preempted`: those that went back to the queue."""

    output: SchedulerOutput | None
    ended: list[tuple[Request, FinishReason]]
    preempted: list[Request]


class Growth(NamedTuple):
    """Blocks handed to running rows: rows int64 [n], counts int64 [n], per group ids in the order of the rows."""

    rows: I64
    counts: I64
    ids: list[list[int]]


HoldPolicy = Callable[[RowBatch, I64], NDArray[np.bool_]]
"""(rows, active row numbers) → which of them stay active but do not run in this step."""


def rows_at_limit(rows: RowBatch) -> I64:
    """Rows whose issued plans already sample their last allowed token: they are not planned again."""
    return np.nonzero(rows.active & (rows.known >= rows.limit))[0]


def may_admit(request: Request) -> bool:
    """A preempted request waits until its tokens in flight have arrived, or they would be sampled twice."""
    return request.in_flight == 0


class Planner:
    """Makes plans. `max_num_batched_tokens`: the token budget of a step."""

    def __init__(self, max_num_batched_tokens: int, hold_policy: HoldPolicy | None = None):
        self.budget = max_num_batched_tokens
        self.hold_policy = hold_policy
        self._bindings = 0

    def make_plan(self, replica: Replica, queue: RequestQueue, router: Router, now: float) -> Plan:
        """Advance `replica` by one plan; requests move between its rows and `queue`."""
        rows, ended, preempted = replica.rows, list[tuple[Request, FinishReason]](), list[Request]()
        if not rows.num_active and not len(queue):
            return Plan(None, ended, preempted)
        for row in rows_at_limit(rows).tolist():
            replica.release(row).move(RequestState.DRAINING)
        active = np.nonzero(rows.active)[0]
        _drop_fronts(replica, active)
        counts, held = self._count_tokens(rows, active)
        active, counts = _make_room(replica, queue, router, active, counts, ended, preempted)
        growth = _grow(replica, active, counts)
        ran = np.zeros(rows.num_rows, dtype=np.int64)
        ran[active] = counts
        rows.planned[active] += counts
        publish_rows(replica, active)
        admitted = [] if preempted else list(self._admit(replica, queue, router, ran, ended))
        if not ran.any():
            return Plan(None, ended, preempted)
        held = held[rows.active[held]]
        return Plan(self._issue(replica, growth, admitted, ran, held, now), ended, preempted)

    # ------------------------------------------------------------------------------------------------ running rows

    def _count_tokens(self, rows: RowBatch, active: I64) -> tuple[I64, I64]:
        """Tokens each active row would run, and the rows that are held: decode first, prefill under what is left."""
        remaining = rows.known[active] - rows.planned[active]
        holds = np.zeros(len(active), dtype=np.bool_)
        if self.hold_policy is not None:
            holds = self.hold_policy(rows, active)
        counts = np.where(holds | (remaining != 1), 0, 1)
        left = self.budget - int(counts.sum())
        prefill = np.nonzero(~holds & (remaining > 1))[0].tolist()
        for place in sorted(prefill, key=lambda place: _order(rows, int(active[place]))):
            counts[place] = min(int(remaining[place]), left)
            left -= int(counts[place])
        return counts, active[counts == 0]

    # -------------------------------------------------------------------------------------------------- admissions

    def _admit(
        self,
        replica: Replica,
        queue: RequestQueue,
        router: Router,
        ran: I64,
        ended: list[tuple[Request, FinishReason]],
    ) -> Iterator[NewRequestData]:
        """Admit from the queue while budget, rows and blocks last; `ran` is told what the admitted run."""
        rows, left = replica.rows, self.budget - int(ran.sum())
        blocked: list[Request] = []
        for request in queue:
            if left <= 0 or not rows.has_free_row:
                break
            if blocked and blocked[0].overtaken >= MAX_OVERTAKEN:
                break
            if not may_admit(request):
                blocked.append(request)
                continue
            if not replica.could_hold(len(request.tokens)):
                if not router.may_ever_fit(len(request.tokens)):
                    queue.remove(request)
                    ended.append((request, "kv_capacity"))
                continue  # another replica's, perhaps one that is down: nobody here has to wait behind it
            hit = replica.manager.get_computed_blocks(request)
            chunk = router.chunk(replica, request, hit, left)
            if not chunk:
                blocked.append(request)
                continue
            if not router.is_best(replica, request, hit):
                continue
            queue.remove(request)
            if blocked:
                blocked[0].overtaken += 1
            left -= chunk
            yield self._bind(replica, request, hit, chunk, ran)

    def _bind(self, replica: Replica, request: Request, hit: PrefixHit, chunk: int, ran: I64) -> NewRequestData:
        rows, manager = replica.rows, replica.manager
        computed = hit.num_blocks * replica.block_size
        new = manager.allocate_slots(request, computed + chunk, hit)
        assert new is not None, "the router said it fits"
        self._bindings += 1
        row = rows.bind(request, computed, hit.num_blocks, self._bindings)
        request.move(RequestState.RUNNING)
        request.replica = replica.index
        if request.cached_tokens is None:
            request.cached_tokens = min(computed, request.prompt_len)
            replica.stats.prefix_queries += request.prompt_len
            replica.stats.prefix_hits += request.cached_tokens
        rows.num_blocks[row] = len(request.blocks[0])
        for group, table in enumerate(request.blocks):
            ids = np.array([block.block_id for block in table], dtype=np.int64)
            replica.digest.add(np.full(len(ids), row), group, np.arange(len(ids)), ids)
            window = manager.windows[group]
            if window:
                rows.front[group, row] = first_live_block(computed, window, replica.block_size)
        data = NewRequestData(
            row=row,
            token_ids=pack(request.tokens),
            prompt_len=request.prompt_len,
            num_computed_tokens=computed,
            block_ids=tuple(pack([block.block_id for block in table]) for table in request.blocks),
            sampling=_sampling_of(request),
        )
        rows.planned[row] += chunk
        ran[row] = chunk
        publish_rows(replica, np.array([row]))
        return data

    # ----------------------------------------------------------------------------------------------------- the plan

    def _issue(
        self, replica: Replica, growth: Growth, admitted: list[NewRequestData], ran: I64, held: I64, now: float
    ) -> SchedulerOutput:
        rows = replica.rows
        sampling = np.nonzero((ran > 0) & (rows.planned == rows.known))[0]
        prefill = np.nonzero(ran > 1)[0]
        digest = replica.digest.value(rows.planned)
        output = SchedulerOutput(
            epoch=replica.epoch,
            step=replica.next_step,
            finish_rows=pack(rows.to_finish),
            admit=tuple(admitted),
            grow_rows=pack(growth.rows),
            grow_counts=b"" if (growth.counts == 1).all() else pack(growth.counts),
            grow_ids=tuple(pack(ids) for ids in growth.ids),
            digest=digest,
            copy_src=b"",
            copy_dst=b"",
            prefill_rows=pack(prefill),
            prefill_num_tokens=pack(ran[prefill]),
            hold_rows=pack(held),
        )
        rows.to_finish.clear()
        step = Step(
            step=replica.next_step,
            rows=sampling,
            token_index=rows.known[sampling],
            binding=rows.binding[sampling],
            digest=digest,
            num_tokens=int(ran.sum()),
            sent_at=now,
            reporting={row: request for row, request in rows.reporting.items() if ran[row]},
        )
        rows.known[sampling] += 1
        replica.next_step += 1
        replica.in_flight.append(step)
        replica.recorder.append(output)
        replica.stats.steps += 1
        return output


def _sampling_of(request: Request) -> SamplingParams:
    """How to draw its next tokens; what its client knows of the prompt is not asked for again."""
    if request.sampling.prompt_logprobs is None or request.prompt_logprobs_due:
        return request.sampling
    return msgspec.structs.replace(request.sampling, prompt_logprobs=None)


def _order(rows: RowBatch, row: int) -> tuple[int, int]:
    request = rows.requests[row]
    assert request is not None
    return request.order


def _drop_fronts(replica: Replica, active: I64) -> None:
    """Null the window fronts of all active rows, from the first position each computes next; held rows too."""
    rows = replica.rows
    for group, window in enumerate(replica.manager.windows):
        if not window:
            continue
        fronts = first_live_block(rows.planned[active], window, replica.block_size)
        behind = np.nonzero(fronts > rows.front[group, active])[0]
        if not len(behind):
            continue
        where, fronts = active[behind], fronts[behind]
        rows.front[group, where] = fronts
        owners, entries, ids = replica.manager.drop_fronts(rows.requests_of(where), group, fronts.tolist())
        if ids:
            replica.digest.remove(where[owners], group, np.array(entries), np.array(ids))


def _make_room(
    replica: Replica,
    queue: RequestQueue,
    router: Router,
    active: I64,
    counts: I64,
    ended: list[tuple[Request, FinishReason]],
    preempted: list[Request],
) -> tuple[I64, I64]:
    """Preempt the latest of the running until the needs of the others fit; returns who is left.

    A row that runs alone shrinks its chunk instead; if not even one token fits, it moves to a replica with a larger
    pool, or, if there is none, ends with kv_capacity once its tokens in flight have arrived.
    """
    rows, size = replica.rows, replica.block_size
    groups, pool = replica.manager.num_groups, replica.manager.pool
    while len(active):
        new = np.maximum(0, -(-(rows.planned[active] + counts) // size) - rows.num_blocks[active])
        if int(new.sum()) * groups <= pool.num_free:
            break
        if len(active) == 1:
            slots = (int(rows.num_blocks[active[0]]) + pool.num_free // groups) * size
            counts = np.array([slots - int(rows.planned[active[0]])])
            if counts[0] < 1:
                known = int(rows.known[active[0]])
                request = replica.release(int(active[0]))
                if router.may_ever_fit(known):
                    request.move(RequestState.WAITING)
                    queue.push(request)
                    replica.stats.preemptions += 1
                    preempted.append(request)
                    return active[:0], counts[:0]
                request.move(RequestState.DRAINING)
                request.void_reason = "kv_capacity"
                if not request.in_flight:
                    ended.append((request, "kv_capacity"))
                active, counts = active[:0], counts[:0]
            break
        place = max(range(len(active)), key=lambda place: _order(rows, int(active[place])))
        victim = replica.release(int(active[place]))
        victim.move(RequestState.WAITING)
        queue.push(victim)
        replica.stats.preemptions += 1
        preempted.append(victim)
        active, counts = np.delete(active, place), np.delete(counts, place)
    return active, counts


def _grow(replica: Replica, active: I64, counts: I64) -> Growth:
    """Hand the running rows the blocks that their tokens need; `_make_room` has made sure they are there."""
    rows, manager, size = replica.rows, replica.manager, replica.block_size
    wanted = np.maximum(0, -(-(rows.planned[active] + counts) // size) - rows.num_blocks[active])
    growing = np.nonzero(wanted)[0]
    grow_rows, grow_counts = active[growing], wanted[growing]
    if not len(growing):
        return Growth(grow_rows, grow_counts, [[] for _ in manager.groups])
    ids = manager.grow(rows.requests_of(grow_rows), grow_counts.tolist())
    assert ids is not None, "room was made"
    owners, entries = grow_rows, rows.num_blocks[grow_rows]
    if int(grow_counts.max()) > 1:
        starts = np.repeat(np.cumsum(grow_counts) - grow_counts, grow_counts)
        owners, entries = np.repeat(grow_rows, grow_counts), np.repeat(entries, grow_counts)
        entries = entries + np.arange(len(owners)) - starts
    for group in range(manager.num_groups):
        replica.digest.add(owners, group, entries, np.array(ids[group]))
    rows.num_blocks[grow_rows] += grow_counts
    return Growth(grow_rows, grow_counts, ids)
