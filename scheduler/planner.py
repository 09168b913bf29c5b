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
from scheduler.replica import Replica, Step, publish_row, publish_rows
from scheduler.request import Request, RequestState
from scheduler.rest import LONG_PROMPT
from scheduler.router import Router
from scheduler.step_budget import StepBudget

LOOKED_AT = 64
"""Requests of the queue among which interrupted ones are looked for: they keep their arrival, so they are in front."""


class Plan(NamedTuple):
    """`output`: to be sent now, or None when no row runs. `ended`: requests that ended in the making;
    `preempted`: those that went back to the queue."""

    output: SchedulerOutput | None
    ended: list[tuple[Request, FinishReason]]
    preempted: list[Request]


class Growth(NamedTuple):
    """Blocks handed to running rows: rows int64 [n], counts int64 [n] (None: one each), per group ids in the order of
    the rows."""

    rows: I64
    counts: I64 | None
    ids: list[I64]


HoldPolicy = Callable[[RowBatch, I64], NDArray[np.bool_]]
"""(rows, active row numbers) → which of them stay active but do not run in this step."""


def rows_at_limit(rows: RowBatch) -> I64:
    """Rows whose issued plans already sample their last allowed token: they are not planned again."""
    return np.nonzero(rows.known >= rows.limit)[0]


def mean_position(rows: RowBatch, prefill: NDArray[np.int32], chunks: NDArray[np.int32]) -> float:
    """Where in their sequences the tokens are, on average, that the latest plan computes of these rows."""
    return float(np.average(rows.planned[prefill] - (chunks + 1) / 2, weights=chunks))


def may_admit(request: Request) -> bool:
    """A preempted request waits until its tokens in flight have arrived, or they would be sampled twice."""
    return request.in_flight == 0


class Planner:
    """Makes plans. `budget`: how many tokens a step may have."""

    def __init__(self, budget: StepBudget, hold_policy: HoldPolicy | None = None):
        self.budget = budget
        self.long_prompt = LONG_PROMPT
        self.hold_policy = hold_policy
        self._bindings = 0

    def make_plan(self, replica: Replica, queue: RequestQueue, router: Router, now: float) -> Plan:
        """Advance `replica` by one plan; requests move between its rows and `queue`."""
        rows, ended, preempted = replica.rows, list[tuple[Request, FinishReason]](), list[Request]()
        if not rows.num_active and not len(queue):
            return Plan(None, ended, preempted)
        for row in rows_at_limit(rows).tolist():
            replica.release(row).move(RequestState.DRAINING)
        _drop_fronts(replica)
        ran, left = self._count_tokens(replica, queue, router)
        growth = _grow(replica, *_make_room(replica, queue, router, ran, ended, preempted))
        rows.planned += ran
        publish_rows(replica)
        admitted = []
        if len(queue) and not preempted:
            admitted = list(self._admit(replica, queue, router, ran, left, ended))
        num_tokens = int(ran.sum())
        if not num_tokens:
            return Plan(None, ended, preempted)
        return Plan(self._issue(replica, growth, admitted, ran, num_tokens, now), ended, preempted)

    # ------------------------------------------------------------------------------------------------ running rows

    def _count_tokens(self, replica: Replica, queue: RequestQueue, router: Router) -> tuple[I64, int]:
        """int64 [num_rows]: tokens each row would run: decode first, prefill under what is left, 0 if it is held. And
        how many are left for admissions."""
        rows = replica.rows
        remaining = rows.known - rows.planned  # 0 only where nobody is
        if self.hold_policy is not None:
            active = np.nonzero(rows.active)[0]
            remaining[active[self.hold_policy(rows, active)]] = 0
        if remaining.max() <= 1 and not len(queue):
            return remaining, 0
        prefill = np.nonzero(remaining > 1)[0].tolist()
        prefill.sort(key=lambda row: _order(rows, row))
        wanted = remaining[prefill].tolist()
        remaining[prefill] = 0
        left = self._prefill_budget(replica, queue, router, int(remaining.sum()), prefill)
        for row, most in zip(prefill, wanted, strict=True):
            remaining[row] = min(most, left)
            left -= int(remaining[row])
        return remaining, left

    def _prefill_budget(
        self, replica: Replica, queue: RequestQueue, router: Router, decoding: int, prefill: list[int]
    ) -> int:
        """Tokens that all rows which do not decode may run, admissions included. prefill: the rows there are, in their
        order."""
        rows, joining = replica.rows, len(queue) if replica.rows.has_free_row else 0
        if not prefill and not joining:
            return 0
        waiting, interrupted, position = float(len(prefill)), 0.0, 0.0
        if prefill:
            interrupted += int(np.count_nonzero(rows.committed[prefill] > rows.prompt_len[prefill]))
            position = float(rows.planned[prefill[0]])
        if joining:
            waiting += joining / router.num_ready
            interrupted += sum(request.num_output > 0 for request in queue.first(LOOKED_AT)) / router.num_ready
        return self.budget.prefill_tokens(
            replica.costs, decoding, waiting, interrupted, position, helped=replica.helped
        )

    def pace(self, replica: Replica) -> tuple[float, float, int]:
        """For those who look: seconds of a step in which the rows that decode now do nothing else, seconds that a token
        of a new prompt adds (0: not known yet), and how many of those the next step would take."""
        rows, costs = replica.rows, replica.costs
        decoding = int(np.count_nonzero(rows.known - rows.planned == 1))
        chunk = costs.chunk_s(0.0)
        return (
            costs.decode_s(decoding) or 0.0,
            0.0 if chunk is None else chunk[1],
            self.budget.prefill_tokens(costs, decoding, waiting=1),
        )

    # -------------------------------------------------------------------------------------------------- admissions

    def _admit(
        self,
        replica: Replica,
        queue: RequestQueue,
        router: Router,
        ran: I64,
        left: int,
        ended: list[tuple[Request, FinishReason]],
    ) -> Iterator[NewRequestData]:
        """Admit from the queue while tokens are left, and rows and blocks last; `ran` is told what the admitted run."""
        blocked: list[Request] = []
        for request in queue:
            if left <= 0 or not router.has_room(replica):
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
            if not router.is_best(replica, request, hit, len(queue) - 1):
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
        if len(request.tokens) - computed >= self.long_prompt:
            rows.long_prompts.add(row)
        rows.slots[row] = len(request.blocks[0]) * replica.block_size
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
        publish_row(replica, row)
        return data

    # ----------------------------------------------------------------------------------------------------- the plan

    def _issue(
        self, replica: Replica, growth: Growth, admitted: list[NewRequestData], ran: I64, num_tokens: int, now: float
    ) -> SchedulerOutput:
        rows, nobody = replica.rows, ran[:0]
        sampling = np.nonzero((rows.planned == rows.known) & rows.active)[0]  # so it runs: before, it was behind
        num_running = int(np.count_nonzero(ran))
        prefill = nobody if num_tokens == num_running else np.nonzero(ran > 1)[0]
        held = nobody if num_running == rows.num_active else np.nonzero(rows.active & (ran == 0))[0]
        digest = replica.digest.value(rows.planned)
        output = SchedulerOutput(
            epoch=replica.epoch,
            step=replica.next_step,
            finish_rows=pack(rows.to_finish),
            admit=tuple(admitted),
            grow_rows=pack(growth.rows),
            grow_counts=b"" if growth.counts is None else pack(growth.counts),
            grow_ids=tuple(pack(ids) for ids in growth.ids),
            digest=digest,
            copy_src=b"",
            copy_dst=b"",
            prefill_rows=pack(prefill),
            prefill_num_tokens=pack(ran[prefill]),
            hold_rows=pack(held),
        )
        rows.to_finish.clear()
        index = rows.known[sampling]
        step = Step(
            step=replica.next_step,
            rows=sampling,
            token_index=index,
            binding=rows.binding[sampling],
            digest=digest,
            num_tokens=num_tokens,
            sent_at=now,
            reporting={row: request for row, request in rows.reporting.items() if ran[row]},
            long_prompt=any(ran[row] for row in rows.long_prompts),
        )
        if rows.long_prompts:
            rows.long_prompts.difference_update(sampling.tolist())
        rows.known[sampling] = index + 1
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


def _drop_fronts(replica: Replica) -> None:
    """Null the window fronts of all rows, from the first position each computes next; held rows too."""
    rows = replica.rows
    for group, window in enumerate(replica.manager.windows):
        if not window:
            continue
        fronts = first_live_block(rows.planned, window, replica.block_size)
        where = np.nonzero(fronts > rows.front[group])[0]
        if not len(where):
            continue
        fronts = fronts[where]
        rows.front[group, where] = fronts
        owners, entries, ids = replica.manager.drop_fronts(rows.requests_of(where), group, fronts.tolist())
        if ids:
            replica.digest.remove(where[owners], group, np.array(entries), np.array(ids))


def _make_room(
    replica: Replica,
    queue: RequestQueue,
    router: Router,
    counts: I64,
    ended: list[tuple[Request, FinishReason]],
    preempted: list[Request],
) -> tuple[I64, I64]:
    """Preempt the latest of the running until the needs of the others fit; `counts` of those that leave become 0.

    Returns the rows that need blocks and how many each, int64 [n]. A row that runs alone shrinks its chunk instead; if
    not even one token fits, it moves to a replica with a larger pool, or, if there is none, ends with kv_capacity once
    its tokens in flight have arrived.
    """
    rows, size = replica.rows, replica.block_size
    groups, pool = replica.manager.num_groups, replica.manager.pool
    while True:
        lacking = rows.planned + counts - rows.slots  # tokens without a slot
        short = np.nonzero(lacking > 0)[0]
        wanted = (lacking[short] + (size - 1)) // size
        if int(wanted.sum()) * groups <= pool.num_free:
            return short, wanted
        active = np.nonzero(rows.active)[0].tolist()
        if len(active) > 1:
            row = max(active, key=lambda row: _order(rows, row))
            preempted.append(_send_back(replica, queue, row))
            counts[row] = 0
            continue
        row = active[0]
        counts[row] = int(rows.slots[row]) + pool.num_free // groups * size - int(rows.planned[row])
        if counts[row] >= 1:
            continue
        counts[row] = 0
        if router.may_ever_fit(int(rows.known[row])):
            preempted.append(_send_back(replica, queue, row))
            continue
        request = replica.release(row)
        request.move(RequestState.DRAINING)
        request.void_reason = "kv_capacity"
        if not request.in_flight:
            ended.append((request, "kv_capacity"))


def _send_back(replica: Replica, queue: RequestQueue, row: int) -> Request:
    """Preempt: the request of this row waits again, at its old place."""
    request = replica.release(row)
    request.move(RequestState.WAITING)
    queue.push(request)
    replica.stats.preemptions += 1
    return request


def _grow(replica: Replica, short: I64, wanted: I64) -> Growth:
    """Hand rows the blocks that `_make_room` found wanted and made room for."""
    rows, manager, size = replica.rows, replica.manager, replica.block_size
    if not len(short):
        return Growth(short, None, [short for _ in manager.groups])
    counts = wanted.tolist()
    ids = manager.grow(rows.requests_of(short), counts)
    assert ids is not None, "room was made"
    slots = rows.slots[short]
    owners, entries = short, slots // size
    several = max(counts) > 1
    if several:
        starts = np.repeat(np.cumsum(wanted) - wanted, wanted)
        owners, entries = np.repeat(short, wanted), np.repeat(entries, wanted)
        entries = entries + np.arange(len(owners)) - starts
    arrays = [np.array(each) for each in ids]
    for group in range(manager.num_groups):
        replica.digest.add(owners, group, entries, arrays[group])
    rows.slots[short] = slots + wanted * size
    return Growth(short, wanted if several else None, arrays)
