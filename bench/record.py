"""What one round saw: the arrival times of each request. Pure. All times are seconds on the clock of the round."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """What one request saw, so far. Times are seconds on the run's clock."""

    output_len: int  # tokens asked for
    start_s: float  # when it was sent; in an open loop, when it was due
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, new tokens) of each chunk, in order
    error: str | None = None
    turn: int = 0  # which one of its conversation

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def failure(self) -> str | None:
        """Why it isn't completed, or None if it is."""
        if self.error is not None:
            return self.error
        if self.num_tokens != self.output_len:
            return f"{self.num_tokens} tokens came, {self.output_len} were asked for"
        return None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.arrivals[-1][0] - self.start_s

    @property
    def stall_s(self) -> float:
        times = [time for time, _ in self.arrivals]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def itl_s(self) -> list[float]:
        """num_tokens - 1 intervals, whose sum is e2e_s - ttft_s."""
        last, first_count = self.arrivals[0]
        intervals = [0.0] * (first_count - 1)
        for time, count in self.arrivals[1:]:
            intervals += [(time - last) / count] * count
            last = time
        return intervals


@dataclass(frozen=True)
class Observed:
    """What one round of one target saw."""

    records: list[RequestRecord]  # of the requests that are measured
    background: list[RequestRecord] = field(default_factory=list)  # of streams beside them, see bench/background.py
