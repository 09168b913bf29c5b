"""What a person looks at, as pure functions of the engine's state: copies of columns, and a bounded list of requests.

Nothing here walks the blocks: a snapshot copies the state bytes that each pool keeps anyway. One block and one table
are described on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protocol.arrays import pack
from protocol.messages import (
    BLOCK_STATES,
    BlockInfo,
    ReplicaSnapshot,
    RequestTable,
    Snapshot,
)
from scheduler.block import KVCacheBlock
from scheduler.block_hash import HASH_BYTES
from scheduler.replica import Replica
from scheduler.request import Request, RequestState

if TYPE_CHECKING:
    from scheduler.engine import Engine

MOST_REQUESTS = 200
MOST_OWNERS = 16
_STATES = {"waiting": 0, "running": 1, "draining": 2}


def take_snapshot(engine: Engine, steps_after: Sequence[int], now: float) -> Snapshot:
    """All replicas at this moment. steps_after: see GetSnapshot."""
    listed = list(islice(_in_order(engine), MOST_REQUESTS))
    rows = [value for progress in listed for value in _row_of(progress)]
    return Snapshot(
        status=engine.status(now),
        replicas=tuple(
            _replica(replica, steps_after[replica.index] if replica.index < len(steps_after) else 0, engine.started)
            for replica in engine.replicas
        ),
        request_ids=tuple(progress.request.request_id for progress in listed),
        requests=pack(rows),
    )


class _Progress(NamedTuple):
    """A request and how far it is, in tokens: known to us, and computed by the plans issued."""

    request: Request
    length: int
    computed: int


def _in_order(engine: Engine) -> Iterator[_Progress]:
    for replica in engine.replicas:
        rows = replica.rows
        active = np.nonzero(rows.active)[0][:MOST_REQUESTS]
        columns = active.tolist(), rows.committed[active].tolist(), rows.planned[active].tolist()
        for row, length, computed in zip(*columns, strict=True):
            request = rows.requests[row]
            assert request is not None
            yield _Progress(request, length, computed)
    for replica in engine.replicas:
        for request in replica.loose.values():
            if request.state is RequestState.DRAINING:
                yield _Progress(request, len(request.tokens), 0)
    for request in engine.queue:
        yield _Progress(request, len(request.tokens), 0)


def _row_of(progress: _Progress) -> tuple[int, ...]:
    """REQUEST_COLUMNS of one request."""
    request = progress.request
    return (
        _STATES[request.state.value],
        -1 if request.replica is None else request.replica,
        -1 if request.row is None else request.row,
        request.prompt_len,
        progress.length - request.prompt_len,
        progress.computed,
        -1 if request.cached_tokens is None else request.cached_tokens,
        request.limit,
        max(-(2**31), min(request.priority, 2**31 - 1)),
    )


def _replica(replica: Replica, after: int, started: float) -> ReplicaSnapshot:
    rows, manager = replica.rows, replica.manager
    slots = rows.slots[rows.active]
    live = slots[None] - rows.front[:, rows.active] * replica.block_size  # [groups, running]
    return ReplicaSnapshot(
        replica=replica.index,
        epoch=replica.epoch,
        blocks=bytes(manager.pool.states) if replica.ready else b"",
        allocated_slots=int(live.sum()),
        wasted_slots=int((slots - rows.planned[rows.active]).sum()) * manager.num_groups,
        steps=replica.step_log.after(after, started),
    )


def block_info(replicas: Sequence[Replica], replica: int, block_id: int, now: float) -> BlockInfo:
    """One block's books, and who holds it: found by going through the tables of the rows, until all are found."""
    if not 0 <= replica < len(replicas) or not replicas[replica].ready:
        return BlockInfo(replica, block_id, 0, "", 0, b"", -1, -1.0, (), b"")
    holder = replicas[replica]
    pool = holder.manager.pool
    if not 0 <= block_id < len(pool.blocks):
        return BlockInfo(replica, block_id, holder.epoch, "", 0, b"", -1, -1.0, (), b"")
    block = pool.blocks[block_id]
    found = list(islice(_owners(holder, block), min(block.ref_cnt, MOST_OWNERS)))
    key = block.block_hash or b""
    group = found[0][1] if found else key[HASH_BYTES] if key else -1
    changed = pool.changed_at[block_id]
    return BlockInfo(
        replica=replica,
        block_id=block_id,
        epoch=holder.epoch,
        state=BLOCK_STATES[pool.states[block_id]],
        ref_cnt=block.ref_cnt,
        block_hash=key[:HASH_BYTES],
        group=group,
        age_s=now - changed if changed else -1.0,
        owners=tuple(request_id for request_id, _, _ in found),
        indices=pack([index for _, _, index in found]),
    )


def _owners(replica: Replica, block: KVCacheBlock) -> Iterator[tuple[str, int, int]]:
    """Who names `block` where: request id, group, table entry. No table names a block twice."""
    for request in replica.rows.running():
        for group, table in enumerate(request.blocks):
            try:
                yield request.request_id, group, table.index(block)
            except ValueError:
                continue


def request_table(replicas: Sequence[Replica], request_id: str, request: Request | None) -> RequestTable:
    """The block table of a running request; without tables when it does not run. None: it is not known."""
    if request is None or request.row is None or request.replica is None:
        return RequestTable(request_id, -1, 0, 0, ())
    return RequestTable(
        request_id=request_id,
        replica=request.replica,
        epoch=replicas[request.replica].epoch,
        num_hit_blocks=request.num_hit_blocks,
        tables=tuple(pack([block.block_id for block in table]) for table in request.blocks),
    )
