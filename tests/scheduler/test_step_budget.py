"""Prompts are computed in pieces while others decode: as large as the learned costs of steps allow, never larger."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.arrays import pack, unpack
from scheduler.step_budget import LEAST_CHUNK, MOST_GROWN, SHARED, StepBudget, StepCosts
from tests.scheduler.deployment import Deployment, greedy

MOST = 512
STRETCH = 2.5
Cost = Callable[[int, int], float]
"""(rows that decode, prompt tokens) → seconds"""


def cost_of(step: float, row: float, chunk: float, token: float) -> Cost:
    """Milliseconds of each part."""
    return lambda decoding, tokens: 1e-3 * (step + row * decoding + ((chunk + token * tokens) if tokens else 0.0))


CPU = cost_of(30.0, 1.0, 5.0, 1.5)


def budget(stretch: float = STRETCH) -> StepBudget:
    return StepBudget(stretch, MOST, block_size=16)


def taught(cost: Cost, rounds: int = 20) -> StepCosts:
    """After steps of many sizes, as they come when requests join and leave."""
    costs = StepCosts()
    teach(costs, cost, rounds)
    return costs


def teach(costs: StepCosts, cost: Cost, rounds: int) -> None:
    for number in range(rounds):
        decoding = 1 + number % 9
        for _ in range(3):
            costs.observe(decoding, 0, 0.0, cost(decoding, 0))
        for tokens in (16, 40 + 7 * decoding, 200):
            costs.observe(decoding, tokens, 0.0, cost(decoding, tokens))


# ------------------------------------------------------------------------------------------------------------ the rule


def test_before_anything_is_known_the_static_budget_holds() -> None:
    costs = StepCosts()
    assert budget().prefill_tokens(costs, 8, 1) == MOST - 8
    for _ in range(10):
        costs.observe(8, 0, 0.0, 0.03)
    assert budget().prefill_tokens(costs, 8, 1) == MOST - 8, "what a prompt token costs is not known"
    costs.observe(8, 400, 0.0, 0.6)
    assert budget().prefill_tokens(costs, 8, 1) < 100


def test_where_nobody_decodes_and_where_it_is_off_the_static_budget_holds() -> None:
    costs = taught(CPU)
    assert budget().prefill_tokens(costs, 0, 1) == MOST
    assert budget(stretch=0.0).prefill_tokens(costs, 8, 1) == MOST - 8


@given(
    step=st.floats(1.0, 100.0),
    row=st.floats(0.0, 3.0),
    token=st.floats(0.01, 3.0),
    decoding=st.integers(1, 9),
    stretch=st.floats(1.5, 8.0),
)
def test_a_step_takes_about_what_it_may(step: float, row: float, token: float, decoding: int, stretch: float) -> None:
    cost = cost_of(step, row, 0.0, token)
    tokens = budget(stretch).prefill_tokens(taught(cost), decoding, waiting=1)
    alone = cost(decoding, 0)
    assert tokens == LEAST_CHUNK or cost(decoding, tokens) <= 1.15 * stretch * alone
    assert tokens == MOST - decoding or cost(decoding, tokens + 17) >= 0.85 * stretch * alone, "no smaller than need be"


@given(
    decoding=st.integers(1, 60), waiting=st.lists(st.integers(1, 300), min_size=2), stretch=st.lists(st.floats(1.1, 9))
)
def test_it_grows_with_the_stretch_and_with_those_who_wait(
    decoding: int, waiting: list[int], stretch: list[float]
) -> None:
    costs = taught(CPU)
    by_interrupted = [budget().prefill_tokens(costs, decoding, 300, count) for count in sorted(waiting)]
    by_waiting = [budget().prefill_tokens(costs, decoding, count) for count in sorted(waiting)]
    by_stretch = [budget(each).prefill_tokens(costs, decoding, 1) for each in sorted(stretch)]
    for smaller, larger in (*pairwise(by_waiting), *pairwise(by_stretch), *pairwise(by_interrupted)):
        assert smaller <= larger
    for tokens in by_waiting + by_stretch + by_interrupted:
        assert LEAST_CHUNK <= tokens <= MOST - decoding
        assert tokens < 64 or tokens % 16 == 0 or tokens == MOST - decoding, "whole blocks, where that costs little"
    assert CPU(decoding, max(by_waiting)) <= 1.2 * MOST_GROWN * STRETCH * CPU(decoding, 0)


def test_one_long_prompt_is_no_crowd_and_a_burst_is() -> None:
    costs, rule = taught(CPU), budget()
    quiet = rule.prefill_tokens(costs, decoding=1, waiting=1)
    assert CPU(1, quiet) <= 1.1 * STRETCH * CPU(1, 0)
    assert rule.prefill_tokens(costs, decoding=1, waiting=7) > 4 * quiet


def test_streams_that_move_are_computed_at_full_speed() -> None:
    costs, rule = taught(CPU), budget()
    assert rule.prefill_tokens(costs, decoding=8, waiting=8, interrupted=8) == MOST - 8
    assert rule.prefill_tokens(costs, decoding=60, waiting=1, interrupted=1) == rule.prefill_tokens(costs, 60, 1)


def test_chunks_are_large_where_a_small_one_costs_as_much() -> None:
    launched_one_by_one = cost_of(2.0, 0.01, 8.0, 0.004)
    assert budget().prefill_tokens(taught(launched_one_by_one), 8, 1) == MOST - 8


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("absurd_s", [1e-6, 60.0, 2000.0])
def test_absurd_times_are_forgotten(absurd_s: float) -> None:
    costs, rule = taught(CPU), budget()
    before = rule.prefill_tokens(costs, 8, 1)
    costs.observe(8, 40, 0.0, absurd_s)
    costs.observe(8, 0, 0.0, absurd_s)
    teach(costs, CPU, rounds=10)
    assert 0.7 * before <= rule.prefill_tokens(costs, 8, 1) <= 1.4 * before


def test_an_absurd_first_step_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(1, 512, 0.0, 100.0)
    costs.observe(1, 0, 0.0, 100.0)
    teach(costs, CPU, rounds=20)
    assert CPU(8, budget().prefill_tokens(costs, 8, 1)) == pytest.approx(STRETCH * CPU(8, 0), rel=0.2)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_another_machine_is_learned(factor: float) -> None:
    """A worker may come back elsewhere, or share its cores from now on."""
    costs = taught(CPU)

    def other(decoding: int, tokens: int) -> float:
        return factor * CPU(decoding, tokens)

    teach(costs, other, rounds=30)
    assert costs.decode_s(8) == pytest.approx(other(8, 0), rel=0.2)
    assert other(8, budget().prefill_tokens(costs, 8, 1)) == pytest.approx(STRETCH * other(8, 0), rel=0.25)


STEPS = st.tuples(st.integers(0, 64), st.sampled_from([0, 0, 1, 16, 511]), st.integers(0, 8000), st.integers(0, 2**31))


@given(st.lists(STEPS, max_size=60), st.integers(1, 64), st.integers(0, 100))
def test_whatever_was_reported_the_answer_is_within_its_bounds_and_the_same_again(
    steps: list[tuple[int, int, int, int]], decoding: int, waiting: int
) -> None:
    answers = []
    for _ in range(2):
        costs = StepCosts()
        for rows, tokens, position, microseconds in steps:
            costs.observe(rows, tokens, position, microseconds * 1e-6)
        answers.append(budget().prefill_tokens(costs, decoding, waiting, position=1000.0))
        assert (costs.known >= 0.0).all() and np.isfinite(costs.known).all()
    assert LEAST_CHUNK <= answers[0] <= MOST - decoding
    assert answers[0] == answers[1]


def test_tokens_far_back_in_a_prompt_cost_more() -> None:
    costs, attention_s = taught(CPU), 1e-6
    for number in range(120):
        position = 64.0 * (number % 40)
        costs.observe(4, 48, position, CPU(4, 48) + attention_s * 48 * position)
        costs.observe(4, 0, 0.0, CPU(4, 0))
    near, far = (budget().prefill_tokens(costs, 4, 1, position=position) for position in (0.0, 2000.0))
    assert near > far
    assert CPU(4, far) + attention_s * far * 2000 <= 1.2 * STRETCH * CPU(4, 0)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_help_brings_is_known_after_one_step_and_when_it_ends_nothing_has_to_be_learned(share: float) -> None:
    """With help every step takes a share of its usual time."""
    costs, rule = taught(CPU), budget()
    alone = rule.prefill_tokens(costs, 8, 1)
    unknown = rule.prefill_tokens(costs, 8, 1, helped=True)
    assert unknown == pytest.approx(alone, rel=0.1), "nothing is known of help: none is counted on"
    for _ in range(30):
        tokens = rule.prefill_tokens(costs, 8, 1, helped=True)
        assert share * CPU(8, tokens) <= 1.15 * SHARED * STRETCH * CPU(8, 0)
        costs.observe(8, tokens, 0.0, share * CPU(8, tokens), helped=True)
        assert share * CPU(8, rule.prefill_tokens(costs, 8, 1, helped=True)) >= 0.85 * STRETCH * CPU(8, 0)
    costs.help_begins()
    assert rule.prefill_tokens(costs, 8, 1, helped=True) == unknown, "it may be other help than before"
    assert rule.prefill_tokens(costs, 8, 1) == alone


@given(st.lists(st.floats(0.0, 100.0), max_size=20))
def test_help_is_never_believed_to_harm_or_to_do_wonders(seconds: list[float]) -> None:
    costs, rule = taught(CPU), budget()
    for each in seconds:
        costs.observe(8, 40, 0.0, each, helped=True)
    assert 0.0999 <= costs.help <= 1.0001
    assert rule.prefill_tokens(costs, 8, 1) <= rule.prefill_tokens(costs, 8, 1, helped=True) <= MOST - 8


# ---------------------------------------------------------------------------------------------------------- the engine


class Timed(Deployment):
    """Its workers report what their steps would take."""

    def __init__(self, cost: Cost = CPU, **settings: object):
        self.cost = cost
        defaults = {"num_blocks": 400, "max_num_batched_tokens": 200, "block_size": 8}
        super().__init__(**{**defaults, **settings})  # type: ignore[arg-type]
        self.steps: list[tuple[int, int]] = []
        """(rows that decode, prompt tokens) of every plan run."""

    def run_plan(self, replica: int = 0) -> m.ModelRunnerOutput:
        worker = self.worker(replica)
        plan = self.plans[worker.identity][0]
        step = next(step for step in self.engine.replicas[replica].in_flight if step.step == plan.step)
        tokens = int(unpack(plan.prefill_num_tokens).sum())
        self.steps.append((step.num_tokens - tokens, tokens))
        super().run_plan(replica)
        seconds = self.cost(*self.steps[-1])
        result = self.results[worker.identity].pop()
        timings = pack([0, 0, round(seconds * 1e6), 0, 0])
        timed = m.ModelRunnerOutput(result.epoch, result.step, result.tokens, result.digest, timings)
        self.results[worker.identity].append(timed)
        return timed

    def warm_up(self) -> None:
        """Requests whose steps teach what steps cost."""
        for number in range(6):
            self.submit(f"warm-up-{number}", [9 + number] * (20 + 25 * number), greedy(6 + number))
        self.run()
        self.steps.clear()

    def check_streams(self) -> None:
        assert self.finished.keys() == self.prompts.keys()
        for name in self.prompts:
            assert self.tokens[name] == self.golden(name), name


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 1000, length).tolist()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_long_prompt_is_cut_while_others_decode_and_only_then(pipeline_depth: int) -> None:
    deployment = Timed(pipeline_depth=pipeline_depth)
    deployment.warm_up()
    deployment.submit("alone", prompt(1, 190), greedy(2))
    deployment.run()
    assert deployment.steps[0] == (0, 190)
    for number in range(4):
        deployment.submit(f"stream-{number}", prompt(2 + number, 8), greedy(60))
    for _ in range(6):
        deployment.step()
    deployment.steps.clear()
    deployment.submit("long", prompt(7, 190), greedy(2))
    deployment.run()
    mixed = [(rows, tokens) for rows, tokens in deployment.steps if tokens]
    assert sum(tokens for _, tokens in mixed) == 190 and len(mixed) >= 4
    for rows, tokens in mixed:
        assert rows == 4
        assert CPU(rows, tokens) <= 3.0 * CPU(rows, 0)
    deployment.check_streams()
    deployment.check_idle()


def test_a_burst_is_not_held_up_by_its_first_stream() -> None:
    """Two replicas, 16 prompts at once: the steps in which few decode and many wait take long chunks."""
    deployment = Timed(replicas=2, max_num_batched_tokens=128)
    deployment.warm_up()
    for number in range(16):
        deployment.submit(f"burst-{number}", prompt(number, 60), greedy(12))
    deployment.run()
    early = [tokens for rows, tokens in deployment.steps if rows in (1, 2) and tokens]
    assert early and max(early) > 100
    for rows, tokens in deployment.steps:
        assert not rows or CPU(rows, tokens) <= 1.2 * MOST_GROWN * STRETCH * CPU(rows, 0)
    deployment.check_streams()


def test_a_stream_of_a_killed_worker_takes_larger_chunks_than_a_new_request() -> None:
    largest = {}
    for interrupted in (True, False):
        deployment = Timed(replicas=2, max_num_seqs=16)
        deployment.warm_up()
        for number in range(8):
            deployment.submit(f"stream-{number}", prompt(number, 100), greedy(60))
        for _ in range(12):
            for worker in (deployment.worker(0), deployment.worker(1)):
                if deployment.plans[worker.identity]:
                    deployment.step(worker.replica)
        here = [name for name, request in deployment.engine.requests.items() if request.replica == 0]
        assert len(here) == 4
        for name in here[interrupted:]:
            deployment.abort(name)
            del deployment.prompts[name], deployment.finished[name]
        deployment.steps.clear()
        deployment.kill(0)
        if not interrupted:
            deployment.submit("new", prompt(99, 110), greedy(2))
        deployment.run()
        largest[interrupted] = max(tokens for rows, tokens in deployment.steps if rows)
        deployment.check_streams()
    assert largest[True] > 2 * largest[False]


def test_preempted_requests_come_back_beside_those_that_decode() -> None:
    """A pool too small for all of them: what is preempted is computed again in pieces, and nothing is lost."""
    deployment = Timed(num_blocks=1 + 40, max_num_batched_tokens=64, enable_prefix_caching=False)
    for number in range(6):
        deployment.submit(f"r{number}", prompt(number, 50), greedy(60))
    deployment.run()
    assert deployment.engine.replicas[0].stats.preemptions > 0
    deployment.check_streams()
    deployment.check_idle()


def test_what_is_learned_is_shown() -> None:
    deployment = Timed()
    metrics = deployment.engine.metrics(0.0).replicas[0]
    assert (metrics.decode_step_s, metrics.prefill_token_s, metrics.prefill_budget) == (0.0, 0.0, 200)
    deployment.warm_up()
    deployment.submit("stream", prompt(1, 8), greedy(60))
    for _ in range(5):
        deployment.step()
    metrics = deployment.engine.metrics(0.0).replicas[0]
    assert metrics.decode_step_s == pytest.approx(CPU(1, 0), rel=0.2)
    assert metrics.prefill_token_s == pytest.approx(0.0015, rel=0.3)
    assert LEAST_CHUNK <= metrics.prefill_budget <= 40
