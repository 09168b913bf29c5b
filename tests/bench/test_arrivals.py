"""Arrivals come at the rate and with the burstiness that was asked for, and an open loop sends when they are due."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arrivals import Arrivals
from bench.load import OpenLoop, open_loop
from bench.record import Observed, RequestRecord
from bench.stats import run_stats
from bench.workload import RandomWorkload, Request
from tests.bench.fake_server import FakeServer, run_virtually

LOAD = RandomWorkload(num_prompts=12, input_len=4, output_len=3)


@given(
    count=st.integers(1, 300), rate=st.floats(0.01, 1e4), burstiness=st.floats(0.01, 100), seed=st.integers(0, 2**32)
)
def test_arrivals_ascend_to_the_end_that_the_rate_gives_and_are_reproducible(count, rate, burstiness, seed):
    arrivals = Arrivals(rate, burstiness)
    times = arrivals.times_s(count, seed, 1)
    assert len(times) == count and times == arrivals.times_s(count, seed, 1)
    assert times[0] >= 0 and all(a <= b for a, b in pairwise(times))
    assert times[-1] == pytest.approx(count / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness: float):
    gaps = np.diff(Arrivals(50.0, burstiness).times_s(20_000, 1, 1))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)  # its coefficient of variation


def test_rounds_differ_and_nonsense_is_refused_by_name():
    assert Arrivals(1.0).times_s(9, 1, 1) != Arrivals(1.0).times_s(9, 1, 2)
    for bad in ({"request_rate": 0.0}, {"request_rate": float("inf")}, {"request_rate": 1.0, "burstiness": -1.0}):
        with pytest.raises(ValueError, match="must be a positive number"):
            Arrivals(**bad)


class Timed(FakeServer):
    """Keeps when each request came in."""

    def __init__(self, clock, **options: object):
        super().__init__(**options)
        self.clock = clock
        self.came: list[float] = []

    async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        self.came.append(self.clock())
        async for count in super().stream(request, answer):
            yield count


def test_an_open_loop_sends_each_request_when_it_is_due_and_waits_for_none():
    load = OpenLoop(LOAD, Arrivals(10.0))
    servers: list[Timed] = []

    async def run(clock) -> Observed:
        servers.append(Timed(clock, token_s=5.0))  # much slower than they arrive
        return await load.run(servers[-1], 1, lambda record: None, clock, 600.0)

    due = load.arrivals.times_s(12, LOAD.seed, 1)
    first, second = run_virtually(run), run_virtually(run)
    assert servers[0].came == servers[1].came == pytest.approx(due)
    assert servers[0].peak == 12
    assert [record.start_s for record in first.records] == pytest.approx(due)
    assert [record.ttft_s for record in first.records] == pytest.approx([5.0] * 12)
    assert first == second


def test_what_a_limit_delays_counts_from_when_it_was_due():
    servers: list[Timed] = []

    async def run(clock) -> list[RequestRecord]:
        servers.append(Timed(clock, token_s=1.0))
        return await open_loop(servers[-1], LOAD.requests(1)[:3], [0.0, 0.5, 10.0], 1, clock=clock)

    records = run_virtually(run)
    assert servers[0].peak == 1
    assert servers[0].came == [0.0, 3.0, 10.0]
    assert [record.ttft_s for record in records] == [1.0, 3.5, 1.0]
    assert run_stats(Observed(records)).duration_s == 13.0
