"""Service level objectives: how long a request may take to count as good. Pure.

A request meets the objectives if it is completed and each time named is at most its limit:
  ttft        the time to its first token
  itl         the 99th percentile of its intervals between tokens
  tpot        the mean of its intervals (vLLM's "time per output token")
  e2e, e2el   the time to its last token
All as defined in bench/stats.py, so in an open loop from the arrival that was due. Goodput counts those that meet all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.quantiles import percentile
from bench.record import RequestRecord

KEYS = {"ttft": "ttft_s", "itl": "itl_p99_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: no such limit."""

    ttft_s: float | None = None
    itl_p99_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Slo:
        """From `ttft:500,itl:100` or `ttft:500` `itl:100`, in ms. Raises ValueError, naming what can't be read."""
        limits: dict[str, float] = {}
        for pair in (pair for text in texts for pair in text.split(",")):
            key, _, value = pair.partition(":")
            if key not in KEYS:
                raise ValueError(f"SLO {pair!r}: unknown key {key!r}; known: {', '.join(KEYS)}")
            try:
                limit = float(value)
            except ValueError:
                raise ValueError(f"SLO {pair!r}: {value!r} is not a number of milliseconds") from None
            if not limit > 0:
                raise ValueError(f"SLO {pair!r}: a limit must be greater than 0")
            if KEYS[key] in limits:
                raise ValueError(f"SLO {pair!r}: there is a limit for this already")
            limits[KEYS[key]] = limit / 1e3
        return cls(**limits)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request counts as good."""
        if record.failure is not None:
            return False
        intervals = record.itl_s()
        pairs = (
            (self.ttft_s, record.ttft_s),
            (self.itl_p99_s, percentile(intervals, 99)),
            (self.tpot_s, sum(intervals) / len(intervals) if intervals else None),
            (self.e2e_s, record.e2e_s),
        )
        return all(limit is None or time is None or time <= limit for limit, time in pairs)
