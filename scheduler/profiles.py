"""Who waits for the profile of which replica's worker: at most one at a time for each. Pure books."""

from __future__ import annotations

from typing import NamedTuple

MOST_STEPS = 1000
MOST_SECONDS = 600.0
PATIENCE_S = 30.0
"""How long a worker that was told to stop may take to write its report."""


class Wait(NamedTuple):
    """A client that waits. stop_at: when the worker is told to report what it has; None: it was told."""

    client: bytes
    query_id: str
    stop_at: float | None
    give_up_at: float


class Profiles:
    """By replica, who waits."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def running(self, replica: int) -> bool:
        """Whether this replica's worker is being profiled."""
        return replica in self._waits

    def start(self, replica: int, client: bytes, query_id: str, until: float) -> None:
        """`client` waits for at most the steps that run before `until`."""
        self._waits[replica] = Wait(client, query_id, until, until + PATIENCE_S)

    def end(self, replica: int) -> Wait | None:
        """The report is there, or will never be; returns who waited, if anyone did."""
        return self._waits.pop(replica, None)

    def to_stop(self, now: float) -> list[int]:
        """Replicas whose worker is to be told now to stop; each is named once."""
        late = [replica for replica, wait in self._waits.items() if wait.stop_at is not None and now >= wait.stop_at]
        for replica in late:
            self._waits[replica] = self._waits[replica]._replace(stop_at=None)
        return late

    def given_up(self, now: float) -> list[Wait]:
        """Those who have waited too long; they wait no more."""
        late = [replica for replica, wait in self._waits.items() if now >= wait.give_up_at]
        return [self._waits.pop(replica) for replica in late]
