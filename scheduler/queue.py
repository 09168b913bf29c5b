"""The one queue of waiting requests, always sorted by (priority, arrival)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.request import Request

MAX_OVERTAKEN = 64
"""Times a request that cannot be admitted yet lets later ones pass; then everyone behind it waits."""


class RequestQueue:
    """Waiting requests. Preempted and recovered ones keep their arrival, so they return to their old place."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order, over a snapshot: entries may be removed meanwhile."""
        return (request for _, request in self._entries.copy())

    def first(self, count: int) -> list[Request]:
        """The first `count` of them, in order."""
        return [request for _, request in self._entries[:count]]

    def push(self, request: Request) -> None:
        """Insert at its place. Arrivals are unique, so requests themselves are never compared."""
        insort(self._entries, (request.order, request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue. Raises KeyError when it is not."""
        place = bisect_left(self._entries, request.order, key=lambda entry: entry[0])
        if place == len(self._entries) or self._entries[place][1] is not request:
            raise KeyError(request.request_id)
        del self._entries[place]
