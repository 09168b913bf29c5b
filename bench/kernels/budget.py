"""Which cases still fit into the time that is left. Pure: the clock is given."""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Seconds for a whole run, from now on. A kind costs what its slowest case took; before the first, a guess."""

    def __init__(self, total_s: float, clock: Callable[[], float], expected_s: dict[str, float]):
        self.total_s = total_s
        self._clock = clock
        self._expected_s = expected_s
        self._seen_s: dict[str, float] = {}
        self._start = clock()

    @property
    def left_s(self) -> float:
        return self.total_s - (self._clock() - self._start)

    def expected_s(self, kind: str) -> float:
        return self._seen_s.get(kind, self._expected_s.get(kind, 0.0))

    def allows(self, kind: str, reserve_s: float = 0.0) -> bool:
        """Whether one more case of this kind likely ends in time, with `reserve_s` to spare."""
        return self.expected_s(kind) + reserve_s <= self.left_s

    def took(self, kind: str, seconds: float) -> None:
        self._seen_s[kind] = max(self._seen_s.get(kind, 0.0), seconds)
