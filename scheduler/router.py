"""Which replica admits a request: the longest cached prefix, weighed against the work each has ahead. Only looks."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.cache_manager import PrefixHit
from scheduler.replica import Replica
from scheduler.request import Request

DECODE_WEIGHT = 32
"""A running request counts as much as this many prompt tokens to compute when replicas are compared."""
PASSING = 4
"""So many tokens of admitted prompts count as one."""


class Router:
    """Compares replicas. `budget`: tokens of a step; `watermark`: share of a pool that admissions leave free."""

    def __init__(self, replicas: Sequence[Replica], budget: int, watermark: float):
        self.replicas = replicas
        self.budget = budget
        self.watermark = watermark

    @property
    def num_ready(self) -> int:
        """Replicas that a worker serves."""
        return sum(replica.ready for replica in self.replicas)

    def chunk(self, replica: Replica, request: Request, hit: PrefixHit, budget: int) -> int:
        """Tokens (at most `budget`) that `replica` would run of `request` if it admitted it now; 0: it has no room.

        Room is a free row, a pool that can hold the request at all, blocks for all known tokens in the full groups and
        for the chunk in window groups, and the watermark. When nothing runs the watermark is waived and the chunk
        shrinks to what fits: whatever fits an empty pool is admitted sooner or later.
        """
        if not replica.rows.has_free_row or not replica.could_hold(len(request.tokens)):
            return 0
        manager = replica.manager
        computed = hit.num_blocks * replica.block_size
        wanted = min(len(request.tokens) - computed, budget)
        if replica.rows.num_active == 0:
            return min(wanted, manager.most_tokens_to_admit(request, hit))
        need = manager.blocks_until_known(request, computed + wanted, hit)
        return wanted if need + self._spare(replica) <= manager.pool.num_free else 0

    def has_room(self, replica: Replica) -> bool:
        """Whether `replica` may have room for some request. False saves to look at each that waits: all need a free row
        and, since at least one token is to be computed, a block in each cache group."""
        rows, manager = replica.rows, replica.manager
        if rows.num_active == 0:
            return True
        return rows.has_free_row and manager.num_groups + self._spare(replica) <= manager.pool.num_free

    def _spare(self, replica: Replica) -> int:
        """Blocks that admissions leave free while anything runs."""
        return int(self.watermark * replica.manager.pool.num_usable)

    def fits_somewhere(self, num_tokens: int) -> bool:
        """Whether the empty pool of some replica can hold `num_tokens`; one that is down counts with the pool it had.

        True while none has ever been up: nobody knows.
        """
        known = [replica for replica in self.replicas if replica.pool_size is not None]
        return not known or any(replica.could_hold(num_tokens) for replica in known)

    def may_ever_fit(self, num_tokens: int) -> bool:
        """The same for a request that was accepted: it also waits for replicas that are yet to bring their pool."""
        return any(replica.pool_size is None or replica.could_hold(num_tokens) for replica in self.replicas)

    def is_best(self, replica: Replica, request: Request, hit: PrefixHit, behind: int = 0) -> bool:
        """Whether no other living replica with room would be cheaper (ties: the lower index).

        behind: requests that wait behind this one. A fair part of them can go to the others, so this replica's load
        counts only as far as it exceeds theirs by more than that part: in a burst each fills its steps.
        """
        share = DECODE_WEIGHT * (behind // self.num_ready)
        mine = (self._cost(replica, request, hit) - share, -1 if share else replica.index)
        for other in self.replicas:
            if other is replica or not other.ready:
                continue
            there = other.manager.get_computed_blocks(request)
            theirs = (self._cost(other, request, there), other.index)
            if theirs < mine and self.chunk(other, request, there, self.budget):
                return False
        return True

    def _cost(self, replica: Replica, request: Request, hit: PrefixHit) -> int:
        """Tokens until the request decodes there: its own uncached ones and the work ahead of it."""
        return len(request.tokens) - hit.num_blocks * replica.block_size + load(replica)


def load(replica: Replica) -> int:
    """Work ahead, in prompt tokens: a weight per running row, and a part of the prompts still to compute.

    Prompts pass while a row stays for as long as it decodes; and what is in flight is over in a moment. Counted in full
    they would decide who gets one row more, and all rows of a replica wait for each of its steps.
    """
    ahead = int((replica.rows.known - replica.rows.planned).sum())
    return ahead // PASSING + DECODE_WEIGHT * replica.rows.num_active
