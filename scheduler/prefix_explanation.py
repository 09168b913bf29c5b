"""Why a prompt does or does not hit the prefix cache: per replica and cache group how far, and what ends it.

Answers a question from outside as a function of the engine's state; touches no block and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import GroupPrefix, PrefixExplanation, ReplicaPrefix
from protocol.windows import first_live_block
from scheduler.block_hash import cache_key
from scheduler.replica import Replica
from scheduler.request import Request


def explain_prefix(query_id: str, request: Request, replicas: Sequence[Replica]) -> PrefixExplanation:
    """How much of `request`'s prompt each replica would find cached if it was admitted now.

    request: one made for this question alone. The hashes of its full blocks are computed once for all replicas.
    """
    size = replicas[0].block_size
    most = max(0, (request.prompt_len - 1) // size)  # the last token is computed in any case
    replicas[0].manager.hash_blocks(request, most)
    return PrefixExplanation(
        query_id=query_id,
        num_tokens=request.prompt_len,
        block_size=size,
        most_blocks=most,
        replicas=tuple(_replica(replica, request, most) for replica in replicas),
    )


def _replica(replica: Replica, request: Request, most: int) -> ReplicaPrefix:
    manager = replica.manager
    hit = manager.get_computed_blocks(request).num_blocks if replica.ready else 0
    return ReplicaPrefix(
        replica=replica.index,
        state="ready" if replica.ready else "down",
        epoch=replica.epoch,
        enabled=replica.enable_caching,
        hit_blocks=hit,
        hit_tokens=hit * replica.block_size,
        groups=tuple(_group(replica, request, most, group) for group in range(manager.num_groups)),
    )


def _group(replica: Replica, request: Request, most: int, group: int) -> GroupPrefix:
    manager, size = replica.manager, replica.block_size
    keys = [cache_key(block_hash, group) for block_hash in request.block_hashes[:most]]
    found = [manager.pool.get_cached_block(key) is not None for key in keys]
    hit = _longest(found, manager.windows[group], size)
    missing = hit if hit < most else -1
    return GroupPrefix(
        group=group,
        sliding_window=manager.windows[group],
        hit_blocks=hit,
        hit_tokens=hit * size,
        cached_blocks=sum(found),
        missing_block=missing,
        missing_first_token=missing * size if missing >= 0 else -1,
        missing_last_token=missing * size + size - 1 if missing >= 0 else -1,
        reason=_reason(replica, request, missing, keys[missing]) if missing >= 0 else "",
    )


def _longest(found: list[bool], window: int, size: int) -> int:
    """The longest length in blocks at which this group alone hits. The block behind it is missing, or it is the last:
    at one block more, everything but that block is among what the shorter length needed."""
    longest = run = 0
    for index, cached in enumerate(found):
        run = run + 1 if cached else 0
        length = index + 1
        front = first_live_block(length * size, window, size) if window else 0
        if run >= length - front:
            longest = length
    return longest


def _reason(replica: Replica, request: Request, index: int, key: bytes) -> str:
    """What became of the block that is missing."""
    if not replica.enable_caching:
        return "disabled"
    block_hash = request.block_hashes[index]
    for other in replica.rows.running():
        if len(other.block_hashes) > index and other.block_hashes[index] == block_hash:
            assert other.row is not None
            if replica.rows.published[other.row] <= index * replica.block_size:
                return "computing"
    departure = replica.evicted.why(key)
    if departure is not None:
        return departure
    return "unknown" if replica.evicted.overflowed else "never_stored"
