"""The closed loop keeps its number of clients, gives every request a record, and lets one failure be one failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.load import ClosedLoop, closed_loop
from bench.record import RequestRecord
from bench.results import Result, TargetResult
from bench.rounds import measure
from bench.stats import RunStats
from bench.workload import RandomWorkload, Request
from tests.bench.fake_server import FakeServer, Ticks

LOAD = RandomWorkload(num_prompts=10, input_len=4, output_len=3)


class Journal:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.done = 0
        self.ended: list[RunStats] = []

    def start(self, label: str, num_requests: int) -> None:
        assert num_requests == LOAD.num_prompts
        self.labels.append(label)

    def request_done(self, record: RequestRecord) -> None:
        self.done += 1

    def end(self, stats: RunStats) -> None:
        self.ended.append(stats)


@pytest.mark.parametrize(("concurrency", "peak"), [(1, 1), (4, 4), (10, 10), (64, 10)])
def test_exactly_so_many_requests_are_in_flight(concurrency: int, peak: int):
    server = FakeServer()
    requests = LOAD.requests(1)
    records = asyncio.run(closed_loop(server, requests, concurrency, clock=Ticks()))
    assert server.peak == peak
    assert server.seen == requests  # in order, each once
    assert [record.failure for record in records] == [None] * 10
    assert all(record.start_s < record.arrivals[0][0] < record.arrivals[-1][0] for record in records)
    with pytest.raises(ValueError, match="concurrency"):
        asyncio.run(closed_loop(server, requests, 0))


def test_a_failure_is_recorded_and_the_load_goes_on():
    server = FakeServer(fails=lambda request: request.index % 5 == 0)
    records = asyncio.run(closed_loop(server, LOAD.requests(1), 3))
    assert [record.failure for record in records] == ["out of luck" if i % 5 == 0 else None for i in range(10)]


def test_a_silent_stream_is_a_failure_after_its_time():
    class Silent(FakeServer):
        async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
            yield 1
            await asyncio.Event().wait()

    records = asyncio.run(closed_loop(Silent(), LOAD.requests(1)[:2], 2, timeout_s=0.02))
    assert [record.failure for record in records] == ["not finished after 0.02 s"] * 2
    assert [record.num_tokens for record in records] == [1, 1]


def measured(repeat: int, **options: object) -> tuple[list[FakeServer], list[TargetResult], Journal]:
    servers = [FakeServer("a"), FakeServer("b")]
    results = [TargetResult(server.name, "fake", None) for server in servers]
    journal = Journal()
    pairs = list(zip(servers, results, strict=True))
    asyncio.run(measure(pairs, ClosedLoop(LOAD, 4), repeat, journal, clock=Ticks(), **options))
    return servers, results, journal


def test_rounds_are_interleaved_equal_within_and_new_between():
    servers, results, journal = measured(2)
    assert journal.labels == [
        "a, warm-up", "b, warm-up", "a, round 1 of 2", "b, round 1 of 2", "a, round 2 of 2", "b, round 2 of 2"
    ]  # fmt: skip
    assert servers[0].seen == servers[1].seen
    assert len({request.prompt_token_ids for request in servers[0].seen}) == 30
    assert journal.done == 60
    for i, result in enumerate(results):
        assert [result.warmup, *result.runs] == journal.ended[i::2]
        assert len(result.runs) == 2


def test_without_warm_up_nothing_is_discarded():
    _, results, journal = measured(1, warmup=False)
    assert journal.labels == ["a, round 1 of 1", "b, round 1 of 1"]
    assert results[0].warmup is None


def test_a_budget_ends_the_rounds_but_leaves_each_target_equally_many():
    _, results, _ = measured(5, budget_s=1.0)
    assert [len(result.runs) for result in results] == [1, 1]


def test_a_result_has_the_ratios_of_the_first_target():
    _, results, _ = measured(2)
    result = Result("cmd", "2026-01-01T00:00:00+00:00", {"cpu": "x", "cores": 2}, ClosedLoop(LOAD, 4), results)
    form = result.as_json()
    assert form["targets"][0]["runs"][1]["output_tokens"] == 30
    (comparison,) = form["comparisons"]
    assert (comparison["subject"], comparison["baseline"]) == ("a", "b")
    assert comparison["metrics"]["output_tokens_per_s"]["ratio"] == pytest.approx(1.0)
