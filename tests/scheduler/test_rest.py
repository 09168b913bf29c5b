"""Replicas that only decode rest while another computes a long prompt: within the stretch, and not without need."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.rest import LONG_PROMPT, MOST_REST_S, Rests, Work, is_news
from scheduler.step_budget import SHARED
from tests.scheduler.deployment import greedy
from tests.scheduler.two_cores import CHUNK_S, TOKEN_S, Machine, decode_s

STRETCH = 2.25
WORK = st.builds(Work, long_prompt=st.booleans(), prompts=st.booleans(), num_decoding=st.integers(0, 8))
STREAMS = Work(long_prompt=False, prompts=False, num_decoding=4)
LONG = Work(long_prompt=True, prompts=True, num_decoding=4)
SHORT = Work(long_prompt=False, prompts=True, num_decoding=4)

# ------------------------------------------------------------------------------------------------------------ the rule


@given(st.dictionaries(st.integers(0, 3), WORK), st.integers(0, 2), st.sampled_from([0.0, 1.5, STRETCH]))
def test_only_those_rest_that_only_decode_and_only_for_a_long_prompt(
    work: dict[int, Work], waiting: int, stretch: float
) -> None:
    resting = Rests(stretch).who(work, waiting)
    for replica in resting:
        assert work[replica].num_decoding and not work[replica].prompts
    assert not resting or (stretch and not waiting and any(todo.long_prompt for todo in work.values()))


def test_for_a_long_prompt_all_others_rest_that_can() -> None:
    rests, idle = Rests(STRETCH), Work(long_prompt=False, prompts=False, num_decoding=0)
    assert rests.who({0: LONG, 1: STREAMS, 2: SHORT, 3: LONG, 4: idle, 5: STREAMS}, 0) == [1, 5]
    assert rests.who({0: LONG, 1: STREAMS}, waiting=1) == []
    assert rests.who({0: SHORT, 1: STREAMS}, 0) == []


@given(st.floats(1.01, 100.0), st.floats(1e-4, 10.0))
def test_a_rest_stays_within_the_stretch(stretch: float, step_s: float) -> None:
    rest_s = Rests(stretch).length_s(step_s)
    assert 0.0 < rest_s <= MOST_REST_S
    assert step_s + rest_s < SHARED * stretch * step_s


def test_nothing_known_or_no_stretch_is_no_rest() -> None:
    assert Rests(STRETCH).length_s(None) == 0.0
    assert Rests(0.0).length_s(0.03) == 0.0


def test_only_news_is_told() -> None:
    assert is_news(0.04, 0.0) and is_news(0.0, 0.04) and is_news(0.05, 0.04)
    assert not is_news(0.0, 0.0) and not is_news(0.0405, 0.04)


# ------------------------------------------------------------------------------------------------- two cores, in time


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 1000, length).tolist()


def machine(**settings: object) -> Machine:
    """Both replicas decode two streams, and know what their steps cost."""
    deployment = Machine(**settings)
    for number in range(6):
        deployment.submit(f"warm-up-{number}", prompt(50 + number, 40 + 25 * number), greedy(6 + number))
    deployment.advance(60.0)
    for number in range(4):
        deployment.submit(f"stream-{number}", prompt(number, 8), greedy(1000))
    deployment.advance(deployment.now + 2.0)
    assert [replica.rows.num_active for replica in deployment.engine.replicas] == [2, 2]
    return deployment


def where(deployment: Machine, name: str) -> int:
    replica = deployment.engine.requests[name].replica
    assert replica is not None
    return replica


def gaps(deployment: Machine, name: str, since: float, until: float) -> list[float]:
    """Between the tokens that a stream got in that time."""
    moments = [at for at in deployment.token_at[name] if since <= at <= until]
    return [after - before for before, after in pairwise(moments)]


def with_long_prompt(**settings: object) -> tuple[Machine, float, float]:
    """A prompt of 2,000 tokens comes and is computed: from when to when."""
    deployment = machine(**settings)
    came = deployment.now
    deployment.submit("long", prompt(77, 2000), greedy(4))
    return deployment, came, deployment.until_first_token("long")


def test_a_long_prompt_comes_sooner_and_all_streams_share_its_stretch() -> None:
    deployment, came, first = with_long_prompt()
    alone, alone_came, alone_first = with_long_prompt(lend_cores=False)
    assert first - came < 0.65 * (alone_first - alone_came)
    usual = decode_s(2)
    resting = {replica for replica, _ in deployment.told}
    assert len(resting) == 1
    for name in ("stream-0", "stream-1", "stream-2", "stream-3"):
        during = gaps(deployment, name, came + 0.3, first - 0.1)
        assert max(during) < 1.05 * SHARED * STRETCH * usual, name
        if where(deployment, name) in resting:
            assert float(np.median(during)) > 0.85 * STRETCH * usual, "its cadence is stretched"
    assert not alone.told


def test_afterwards_all_is_as_it_was() -> None:
    deployment, _, first = with_long_prompt()
    deployment.advance(first + 1.0)
    assert deployment.told[-1][1] == 0.0
    assert not any(replica.helped for replica in deployment.engine.replicas)
    for name in ("stream-0", "stream-1", "stream-2", "stream-3"):
        after = gaps(deployment, name, first + 0.4, first + 1.0)
        assert max(after) < 1.2 * decode_s(3), name
    deployment.advance(200.0)
    for name in deployment.prompts:
        assert deployment.tokens[name] == deployment.golden(name), name
    deployment.check_idle()


def test_a_new_request_ends_the_rest_it_would_wait_for() -> None:
    deployment = machine()
    deployment.submit("long", prompt(77, 2800), greedy(4))
    deployment.advance(deployment.now + 1.0)
    [resting] = {replica for replica, _ in deployment.told}
    core = deployment.cores[resting]
    while core.left_s is not None or deployment.now - core.ended > 0.01:
        deployment.advance(deployment.now + 0.001)  # its rest has just begun
    came = deployment.now
    deployment.submit("new", prompt(78, 16), greedy(4))
    assert deployment.told[-1] == (resting, 0.0)
    first = deployment.until_first_token("new")
    assert where(deployment, "new") == resting
    own_s = decode_s(2) + CHUNK_S + 16 * TOKEN_S
    assert first - came < 1.05 * (2 * decode_s(2) + own_s), "two steps that were planned before, and its own"
    deployment.advance(first + 0.1)
    assert deployment.told[-1][1] > 0.0, "then it rests again"
    helped = deployment.engine.replicas[1 - resting]
    assert helped.helped
    for name in ("stream-0", "stream-1", "stream-2", "stream-3"):
        if where(deployment, name) == helped.index:
            late = [gap for gap in gaps(deployment, name, came, first + 0.1) if gap > 1.2 * STRETCH * decode_s(2)]
            assert len(late) <= 2, "the steps that counted on help and did not get it"


def test_when_the_worker_with_the_prompt_dies_nobody_rests_for_it() -> None:
    deployment = machine()
    deployment.submit("long", prompt(77, 2800), greedy(4))
    deployment.advance(deployment.now + 1.0)
    [resting] = {replica for replica, _ in deployment.told}
    deployment.kill(1 - resting)
    assert deployment.told[-1] == (resting, 0.0)
    deployment.start(1 - resting)
    deployment.until_first_token("long")


def test_a_prompt_that_is_aborted_is_rested_for_no_longer() -> None:
    deployment = machine()
    deployment.submit("long", prompt(77, 2800), greedy(4))
    deployment.advance(deployment.now + 1.0)
    deployment.abort("long")
    deployment.advance(deployment.now + 0.3)
    assert deployment.told[-1][1] == 0.0


def test_many_short_prompts_are_no_long_one() -> None:
    deployment = machine(max_num_seqs=16)
    for number in range(12):
        deployment.submit(f"short-{number}", prompt(60 + number, LONG_PROMPT // 3), greedy(4))
    deployment.advance(deployment.now + 60.0)
    assert not deployment.told


def test_a_long_prompt_that_is_cached_is_no_long_one() -> None:
    deployment, _, first = with_long_prompt()
    deployment.advance(first + 1.0)
    deployment.told.clear()
    deployment.submit("again", [*prompt(77, 2000), *prompt(5, 300)], greedy(4))
    deployment.until_first_token("again")
    assert not deployment.told


@pytest.mark.parametrize("settings", [{"max_step_stretch": 0.0}, {"lend_cores": False}, {"replicas": 1}])
def test_nobody_rests_where_it_is_off_or_there_is_nobody(settings: dict[str, object]) -> None:
    if "replicas" in settings:
        deployment = Machine(replicas=1)
        deployment.submit("stream", prompt(1, 8), greedy(200))
        deployment.advance(2.0)
    else:
        deployment = machine(**settings)
    deployment.submit("long", prompt(77, 2000), greedy(4))
    deployment.until_first_token("long")
    assert not deployment.told
    assert deployment.engine.metrics(0.0).replicas[0].rested_s == 0.0


def test_what_was_rested_is_counted_and_is_no_cost_of_a_step() -> None:
    deployment, came, first = with_long_prompt()
    [resting] = {replica for replica, _ in deployment.told}
    metrics = deployment.engine.metrics(deployment.now).replicas
    assert 0.4 * (first - came) < metrics[resting].rested_s < first - came
    assert metrics[1 - resting].rested_s == 0.0
    assert metrics[resting].decode_step_s == pytest.approx(decode_s(2), rel=0.2)
