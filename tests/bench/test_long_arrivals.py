"""Long prompts meet a background that decodes steadily, and what it felt is counted while they were computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.background import background_metrics
from bench.long_arrivals import SETTLED_TOKENS, BesideStreams, LongArrivals
from bench.record import Observed, RequestRecord
from bench.stats import run_stats
from bench.workload import Request
from tests.bench.fake_server import FakeServer, Ticks

LOAD = LongArrivals(num_prompts=3, input_len=4, output_len=12, long_input_len=30, long_output_len=2)
STREAMS = 4


class Watched(FakeServer):
    """Keeps, for each long prompt, how many tokens the background had brought and how many long ones there were."""

    def __init__(self, **options: object):
        super().__init__(**options)
        self.tokens = 0
        self.before: list[int] = []
        self.long_now = 0

    async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        long = len(request.prompt_token_ids) == LOAD.long_input_len
        if long:
            self.before.append(self.tokens)
            assert self.long_now == 0
        self.long_now += long
        async for count in super().stream(request):
            self.tokens += 0 if long else count
            yield count
        self.long_now -= long


def observe(server: FakeServer, timeout_s: float = 30.0) -> tuple[Observed, list[RequestRecord]]:
    done: list[RequestRecord] = []
    load = BesideStreams(LOAD, STREAMS)
    return asyncio.run(load.run(server, 1, done.append, Ticks(), timeout_s)), done


def test_each_long_prompt_meets_settled_streams_alone():
    server = Watched()
    observed, done = observe(server)
    assert observed.records == done and [record.failure for record in done] == [None] * 3
    gaps = [b - a for a, b in zip([0, *server.before], server.before, strict=False)]
    assert len(gaps) == 3 and min(gaps) >= STREAMS * SETTLED_TOKENS
    assert server.peak == STREAMS + 1 and server.now == 0  # nothing goes on after the round


def test_streams_begin_anew_and_are_cut_off_without_a_failure():
    observed, _ = observe(Watched())
    assert len(observed.background) > STREAMS
    assert [record.failure for record in observed.background] == [None] * len(observed.background)
    assert min(record.num_tokens for record in observed.background) < LOAD.output_len
    stats = run_stats(observed)
    assert (stats.completed, stats.failed, stats.output_tokens) == (3, 0, 6)
    assert stats.background_itl_p50_s is not None and stats.background_tokens_per_s is not None


def test_a_failed_stream_is_counted_and_missed_by_nobody():
    observed, _ = observe(Watched(fails=lambda request: request.index == 1 and request.output_len == LOAD.output_len))
    assert sum(record.failure == "out of luck" for record in observed.background) == 1
    stats = run_stats(observed)
    assert (stats.completed, stats.failed, stats.errors) == (3, 1, {"out of luck": 1})


def test_a_stream_that_falls_silent_is_given_up():
    class Silent(FakeServer):
        async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
            if request.index == 0 and request.output_len == LOAD.output_len:
                yield 1
                await asyncio.Event().wait()
            async for count in super().stream(request):
                yield count

    observed, _ = observe(Silent(), timeout_s=0.05)
    failures = [record.failure for record in observed.background if record.failure]
    assert failures == ["a stream of the background brought no 8 tokens in 0.05 s"]
    assert [record.failure for record in observed.records] == [None] * 3


def test_the_background_of_a_round_is_the_same_for_each_target_and_new_in_the_next():
    def prompts(round_index: int) -> list[tuple[int, ...]]:
        found = [request.prompt_token_ids for request in LOAD.requests(round_index)]
        return found + [r.prompt_token_ids for r, _ in zip(LOAD.background(round_index), range(20), strict=False)]

    assert prompts(1) == prompts(1)
    assert len({*prompts(1), *prompts(2)}) == 2 * 23


def test_intervals_count_as_disturbed_from_the_sending_of_a_long_prompt_to_its_first_token():
    long = RequestRecord(2, 10.0, [(13.0, 1), (20.0, 1)])
    stream = RequestRecord(8, 0.0, [(8.0, 1), (9.0, 1), (10.5, 1), (13.5, 2), (14.5, 1), (18.5, 2)])
    assert background_metrics([stream], [long]) == pytest.approx(
        {
            "background_itl_p50_s": 1.5,  # of 1.5, 1.5, 1.5
            "background_itl_p99_s": 1.5,
            "background_itl_max_s": 1.5,
            "background_itl_max_over_p50": 1.0,
            "background_quiet_itl_p50_s": 1.5,  # of 1, 1, 2, 2
            "background_tokens_per_s": 0.6,  # of 10 s, in which 6 tokens came
        }
    )


def test_without_a_background_there_is_nothing_to_report():
    assert set(background_metrics([], [RequestRecord(1, 0.0, [(1.0, 1)])]).values()) == {None}


@pytest.mark.parametrize(
    ("change", "named"), [({"long_input_len": 0}, "long_input_len"), ({"output_len": 8}, "more than 8")]
)
def test_a_load_that_can_not_be_is_refused_by_name(change: dict[str, int], named: str):
    with pytest.raises(ValueError, match=named):
        LongArrivals(**change)
