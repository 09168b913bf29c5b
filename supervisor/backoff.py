"""How long to wait before a dead process is started again. Pure: durations in, durations out."""

from __future__ import annotations


class Backoff:
    """One process's record of deaths.

    A process that had been ready for `stable_s` is restarted at once. One that keeps dying waits 0.2 s, 0.4 s, … up to
    10 s if it never got ready, up to 1 s if it did: it serves between deaths, so each pause costs service.
    """

    FIRST_S = 0.2
    MOST_S = 10.0
    MOST_ONCE_READY_S = 1.0

    def __init__(self, stable_s: float = 2.0):
        self._stable_s = stable_s
        self._deaths = 0
        self.failed_starts = 0
        """Deaths in a row before the process was ready."""

    def after_death(self, ready_for_s: float | None) -> float:
        """Seconds until the restart. ready_for_s: how long it had been ready, None if it never was."""
        if ready_for_s is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if ready_for_s >= self._stable_s:
                self._deaths = 0
                return 0.0
        most = self.MOST_S if ready_for_s is None else self.MOST_ONCE_READY_S
        delay = min(most, self.FIRST_S * 2.0 ** min(self._deaths, 16))
        self._deaths += 1
        return delay
