"""When the requests of an open loop arrive. Pure; times are seconds from the start of a round.

The gaps between arrivals are gamma-distributed with mean 1/rate and shape `burstiness`, as in `vllm bench serve`:
shape 1 is a Poisson process, less comes in bursts, more is steadier. Also as there, the gaps are stretched so that n
requests arrive in exactly n/rate: so each round offers the rate that was asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrivals:
    request_rate: float  # requests a second (with conversations: of those that begin)
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be a positive number")

    def times_s(self, count: int, seed: int, round_index: int) -> list[float]:
        """`count` times, ascending, the last one at count / request_rate: the same at every call."""
        rng = np.random.default_rng([seed, round_index, 4])
        times = np.cumsum(rng.gamma(self.burstiness, size=count))
        if count == 0 or times[-1] == 0:  # so bursty that every gap underflowed
            return [count / self.request_rate] * count
        return (times * (count / self.request_rate / times[-1])).tolist()
