"""Which replica admits a request: the longest cached prefix, weighed against the work each has ahead. Only looks."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.cache_manager import PrefixHit
from scheduler.replica import Replica
from scheduler.request import Request

DECODE_WEIGHT = 32
"""A running request counts as much as this many prompt tokens to compute when replicas are compared."""


class Router:
    """Compares replicas. `budget`: tokens of a step; `watermark`: share of a pool that admissions leave free."""

    def __init__(self, replicas: Sequence[Replica], budget: int, watermark: float):
        self.replicas = replicas
        self.budget = budget
        self.watermark = watermark

    def has_room(self, replica: Replica, request: Request, hit: PrefixHit, budget: int) -> bool:
        """Whether `replica` can admit: a free row, all known tokens fit in the full groups (a chunk of at most `budget`
        in window groups) and the watermark stays free. The watermark is waived when nothing runs.
        """
        if not replica.rows.has_free_row:
            return False
        manager = replica.manager
        computed = hit.num_blocks * replica.block_size
        num_tokens = computed + min(len(request.tokens) - computed, budget)
        spare = 0 if replica.rows.num_active == 0 else int(self.watermark * manager.pool.num_usable)
        return manager.blocks_until_known(request, num_tokens, hit) + spare <= manager.pool.num_free

    def fits_somewhere(self, num_tokens: int) -> bool:
        """Whether some living replica's empty pool could hold `num_tokens`. True while none lives: nobody knows."""
        ready = [replica for replica in self.replicas if replica.ready]
        return not ready or any(replica.manager.fits_empty_pool(num_tokens) for replica in ready)

    def is_best(self, replica: Replica, request: Request, hit: PrefixHit) -> bool:
        """Whether no other living replica with room would be cheaper (ties: the lower index)."""
        mine = (self._cost(replica, request, hit), replica.index)
        for other in self.replicas:
            if other is replica or not other.ready:
                continue
            there = other.manager.get_computed_blocks(request)
            theirs = (self._cost(other, request, there), other.index)
            if theirs < mine and self.has_room(other, request, there, self.budget):
                return False
        return True

    def _cost(self, replica: Replica, request: Request, hit: PrefixHit) -> int:
        """Tokens until the request decodes there: its own uncached ones and the work ahead of it."""
        return len(request.tokens) - hit.num_blocks * replica.block_size + load(replica)


def load(replica: Replica) -> int:
    """Tokens of work ahead: prompts still to compute, steps in flight, and a weight per running row."""
    ahead = int((replica.rows.known - replica.rows.planned).sum())
    return ahead + sum(step.num_tokens for step in replica.in_flight) + DECODE_WEIGHT * replica.rows.num_active
