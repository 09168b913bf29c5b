"""A conversation sends its growing history, with the answers that its server gave, each turn after the last answer."""

from __future__ import annotations

import asyncio

import pytest

from bench.load import ClosedLoop, closed_loop
from bench.multi_turn import MultiTurn
from bench.record import Observed, RequestRecord
from bench.stats import run_stats
from tests.bench.fake_server import FakeServer, run_virtually

LOAD = MultiTurn(num_prompts=3, input_len=5, output_len=4, turns=3, turn_len=2)


def test_each_turn_sends_all_that_was_said_before():
    server = FakeServer()
    records = asyncio.run(closed_loop(server, LOAD.requests(1), 1))
    assert [record.turn for record in records] == [0, 1, 2] * 3
    assert [record.failure for record in records] == [None] * 9
    for i, request in enumerate(LOAD.requests(1)):
        first, second, third = (sent.prompt_token_ids for sent in server.seen[3 * i : 3 * i + 3])
        answer = (0, 1, 2, 3)  # what the fake server says
        assert first == request.prompt_token_ids and len(first) == 5
        assert second == (*first, *answer, *request.follow_ups[0].token_ids)
        assert third == (*second, *answer, *request.follow_ups[1].token_ids)


def test_conversations_are_the_same_at_every_call_and_new_in_each_round():
    assert LOAD.requests(1) == LOAD.requests(1)
    added = [turn.token_ids for i in (1, 2) for request in LOAD.requests(i) for turn in request.follow_ups]
    assert len(set(added)) == 2 * 3 * 2


def test_the_next_turn_waits_for_the_answer_and_the_thinking():
    load = MultiTurn(num_prompts=2, output_len=4, turns=2, think_s=3.0)

    async def run(clock) -> Observed:
        return await ClosedLoop(load, 2).run(FakeServer(token_s=1.0), 1, lambda record: None, clock, 600.0)

    records = run_virtually(run).records
    pauses = [request.follow_ups[0].think_s for request in load.requests(1)]
    assert [records[1].start_s, records[3].start_s] == pytest.approx([4.0 + pause for pause in pauses])
    assert pauses[0] != pauses[1] and min(pauses) > 0


def test_a_failed_turn_fails_those_after_it_and_no_other_conversation():
    done: list[RequestRecord] = []
    server = FakeServer(fails=lambda request: request.index == 1 and len(request.prompt_token_ids) == 11)
    records = asyncio.run(closed_loop(server, LOAD.requests(1), 3, done.append))
    assert [record.failure for record in records[3:6]] == [None, "out of luck", "an earlier turn failed"]
    assert [record.failure for record in (*records[:3], *records[6:])] == [None] * 6
    assert len(done) == LOAD.num_requests == 9


def test_the_first_turns_are_told_from_the_later_ones():
    def turn(number: int, ttft: float) -> RequestRecord:
        return RequestRecord(1, 0.0, [(ttft, 1)], turn=number)

    stats = run_stats(Observed([turn(0, 4.0), turn(1, 1.0), turn(2, 2.0), turn(0, 8.0)]))
    assert (stats.ttft_first_turn_p50_s, stats.ttft_later_turns_p50_s) == (6.0, 1.5)
    assert run_stats(Observed([turn(0, 4.0)])).ttft_first_turn_p50_s is None


@pytest.mark.parametrize(
    ("change", "named"), [({"turns": 0}, "turns"), ({"turn_len": 0}, "turn_len"), ({"think_s": -1.0}, "think_s")]
)
def test_a_conversation_that_can_not_be_is_refused_by_name(change: dict[str, float], named: str):
    with pytest.raises(ValueError, match=named):
        MultiTurn(**change)
