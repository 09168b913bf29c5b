"""Three ways to give requests KV slots: reserve the maximum, contiguous on demand, paged. No clock, no queue.

All answer the same calls: `admit` and `grow` say whether there is room and change nothing if not. A slot holds the keys
and values of one token.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from protocol.messages import KVCacheGroupSpec, SamplingParams
from scheduler.cache_manager import KVCacheManager
from scheduler.request import Request


class Allocator(Protocol):
    num_slots: int
    moves: int
    """Regions moved so far."""
    moved_slots: int
    """Tokens copied by them."""

    @property
    def num_free(self) -> int:
        """Free slots."""

    def need(self, length: int) -> int:
        """Slots that a request of `length` tokens takes."""

    def admit(self, key: int, length: int) -> bool:
        """Give request `key` slots for `length` tokens."""

    def grow(self, key: int, length: int) -> bool:
        """Let a request that has slots have enough for `length` tokens."""

    def free(self, key: int) -> None:
        """Take its slots back."""

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""


class Reserve:
    """Each request gets one region for the longest there may be. All regions have one size, so no hole is too small."""

    moves = moved_slots = 0

    def __init__(self, num_slots: int, longest: int):
        self.num_slots, self.longest = num_slots, longest
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._held) * self.longest

    def need(self, length: int) -> int:
        return self.longest

    def admit(self, key: int, length: int) -> bool:
        if self.num_free < self.longest:
            return False
        self._held.add(key)
        return True

    def grow(self, key: int, length: int) -> bool:
        assert key in self._held and length <= self.longest
        return True

    def free(self, key: int) -> None:
        self._held.remove(key)

    def check(self) -> None:
        assert self.num_free >= 0


@dataclass(order=True)
class Region:
    start: int
    size: int = field(compare=False)
    key: int = field(compare=False)
    length: int = field(compare=False)
    """Tokens it holds: what moving it copies."""

    @property
    def end(self) -> int:
        return self.start + self.size


class Contiguous:
    """One region for each request, sized by what it holds, in units of `grain` slots, in the first hole that is large
    enough.

    A request that comes in waits for a hole. One that grows into its neighbour is moved to a hole, and if none is large
    enough, its neighbours are pushed together: the run of neighbours that holds the fewest tokens.
    """

    def __init__(self, num_slots: int, grain: int):
        self.num_slots, self.grain = num_slots // grain * grain, grain
        self.moves = self.moved_slots = 0
        self.regions: list[Region] = []
        """By start."""
        self._by_key: dict[int, Region] = {}
        self.num_free = self.num_slots

    def need(self, length: int) -> int:
        return -(-length // self.grain) * self.grain

    def holes(self) -> list[tuple[int, int]]:
        """(start, size) in order of address; before, between and behind the regions, empty ones included."""
        ends = [0, *(region.end for region in self.regions)]
        starts = [*(region.start for region in self.regions), self.num_slots]
        return [(end, start - end) for end, start in zip(ends, starts, strict=True)]

    @property
    def largest_hole(self) -> int:
        return max(size for _, size in self.holes())

    def admit(self, key: int, length: int) -> bool:
        size = self.need(length)
        if size > self.num_free:
            return False
        start = self._first_fit(size)
        if start is None:
            return False
        self._place(Region(start, size, key, length))
        return True

    def grow(self, key: int, length: int) -> bool:
        region = self._by_key[key]
        more = self.need(length) - region.size
        if more <= 0:
            region.length = length
            return True
        if more > self.num_free:
            return False
        index = self.regions.index(region)
        limit = self.regions[index + 1].start if index + 1 < len(self.regions) else self.num_slots
        if region.end + more > limit:
            held = region.length
            self._take(region)
            start = self._first_fit(region.size + more)
            if start is None:
                start = self._push_together(region.size + more)
            region.start = start
            region.size += more
            self._place(region)
            self.moves += 1
            self.moved_slots += held
        else:
            region.size += more
            self.num_free -= more
        region.length = length
        return True

    def free(self, key: int) -> None:
        self._take(self._by_key[key])

    def moves_to_fit(self, size: int) -> tuple[int, int, int] | None:
        """The cheapest way to have a hole of `size`: regions [first, end) pushed down. (tokens, first, end)

        Cheapest in tokens copied, among runs of neighbours whose holes, with those at both sides, are large enough.
        None: not even all of them are.
        """
        sizes = [size for _, size in self.holes()]
        best: tuple[int, int, int] | None = None
        first, room, tokens = 0, sizes[0], 0
        for end in range(len(self.regions) + 1):  # holes first…end surround the regions [first, end)
            if end:
                room += sizes[end]
                tokens += self.regions[end - 1].length
            while room - sizes[first] >= size and first < end:
                room -= sizes[first]
                tokens -= self.regions[first].length
                first += 1
            if room >= size and (best is None or tokens < best[0]):
                best = (tokens, first, end)
        return best

    def _push_together(self, size: int) -> int:
        """Move regions until there is a hole of `size`; returns its start."""
        found = self.moves_to_fit(size)
        assert found is not None, "enough is free"
        _, first, end = found
        place = self.regions[first - 1].end if first else 0
        for region in self.regions[first:end]:
            self.moves += region.start != place
            self.moved_slots += region.length * (region.start != place)
            region.start = place
            place = region.end
        return place

    def _first_fit(self, size: int) -> int | None:
        return next((start for start, hole in self.holes() if hole >= size), None)

    def _place(self, region: Region) -> None:
        insort(self.regions, region)
        self._by_key[region.key] = region
        self.num_free -= region.size

    def _take(self, region: Region) -> None:
        self.regions.remove(region)
        del self._by_key[region.key]
        self.num_free += region.size

    def check(self) -> None:
        place = 0
        for region in self.regions:
            assert region.start >= place and 0 < region.length <= region.size, region
            place = region.end
        assert place <= self.num_slots
        assert self.num_free == self.num_slots - sum(region.size for region in self.regions)


class Paged:
    """The scheduler's own KVCacheManager over its own BlockPool, one cache group of full attention."""

    moves = moved_slots = 0

    def __init__(self, num_slots: int, block_size: int):
        self.block_size = block_size
        self.manager = KVCacheManager(
            (KVCacheGroupSpec(0, (0,), 1, 64),), block_size, num_slots // block_size + 1, enable_caching=False
        )
        self.num_slots = self.manager.pool.num_usable * block_size
        self._requests: dict[int, Request] = {}

    @property
    def num_free(self) -> int:
        return self.manager.pool.num_free * self.block_size

    def need(self, length: int) -> int:
        return self.manager.blocks_for(length) * self.block_size

    def admit(self, key: int, length: int) -> bool:
        if self.need(length) > self.num_free:
            return False
        prompt = np.zeros(length, dtype=np.int32)
        self._requests[key] = request = Request(
            str(key), prompt, SamplingParams(), limit=length, stop_ids=(), root=b"", arrival=key
        )
        return self.manager.allocate_slots(request, length) is not None

    def grow(self, key: int, length: int) -> bool:
        request = self._requests[key]
        if length <= len(request.blocks[0]) * self.block_size:
            return True
        return self.manager.allocate_slots(request, length) is not None

    def free(self, key: int) -> None:
        self.manager.free(self._requests.pop(key))

    def check(self) -> None:
        self.manager.check(self._requests.values())
