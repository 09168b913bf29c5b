"""What crosses the wire is changes: in steady decode a plan's size does not depend on how many rows run."""

from __future__ import annotations

import numpy as np
import pytest

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.config import EngineConfig
from scheduler import events as e
from scheduler.engine import Engine
from tests.scheduler.deployment import greedy, hello_of, model_of
from tests.sim.scenario import Scenario
from tests.sim.worker import SimulatedWorker

BLOCK = 16


def plans_in(actions: list[e.Action]) -> list[m.SchedulerOutput]:
    sent = [action.message for action in actions if isinstance(action, e.ToWorker)]
    return [message for message in sent if isinstance(message, m.SchedulerOutput)]


def steady_decode(rows: int, windows: tuple[int, ...]) -> list[m.SchedulerOutput]:
    """The plans of 3 blocks' worth of steps with `rows` running, prompts of all remainders, results made up."""
    config = EngineConfig(
        workers=1, block_size=BLOCK, max_model_len=256, max_num_seqs=rows, max_num_batched_tokens=rows * 40,
        pipeline_depth=1,
    )  # fmt: skip
    model = model_of(windows)
    engine = Engine(config, model, hash_key=b"secret")
    blocks = 1 + rows * 10 * len(windows)
    scenario = Scenario(0, config, model, [blocks], [], [], {}, 0.0, 0, 0.0, 0.0)
    worker = SimulatedWorker(scenario, 0, 1)
    for number in range(rows):
        prompt = [number % 1000, *range(number % BLOCK + 1)]
        engine.handle(e.FromClient(b"client", m.Submit(f"r{number}", pack(prompt), greedy(200))), 0.0)
    actions = engine.handle(e.FromWorker(worker.identity, hello_of(worker)), 0.0)
    plans = plans_in(actions)
    for _ in range(2 + 3 * BLOCK):
        step = engine.replicas[0].in_flight[0]
        tokens = np.full(len(step.rows), 7)
        result = m.ModelRunnerOutput(0, step.step, pack(tokens), step.digest, b"")
        actions = engine.handle(e.FromWorker(worker.identity, result), 0.0)
        plans += plans_in(actions)
    return plans[2:]


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_a_steady_plan_takes_under_100_bytes_and_8_for_each_block(rows: int) -> None:
    plans = steady_decode(rows, windows=(0,))
    assert len(plans) == 3 * BLOCK + 1
    handed_out = 0
    for plan in plans:
        blocks = sum(len(unpack(ids)) for ids in plan.grow_ids)
        handed_out += blocks
        assert len(codec.encode(plan)) <= 100 + 8 * blocks
        assert not plan.prefill_rows and not plan.hold_rows and not plan.admit and not plan.finish_rows
    assert 3 * rows <= handed_out <= 4 * rows


def test_a_step_without_new_blocks_is_as_small_for_1024_rows_as_for_one() -> None:
    for rows in (1, 1024):
        plans = steady_decode(rows, windows=(0,))
        smallest = min(len(codec.encode(plan)) for plan in plans)
        assert smallest < 100 if rows == 1 else smallest < 100 + 8 * rows / BLOCK


def test_two_groups_take_12_bytes_for_each_row_that_grows() -> None:
    for plan in steady_decode(1024, windows=(0, 32)):
        rows = len(unpack(plan.grow_rows))
        assert len(codec.encode(plan)) <= 100 + 12 * rows
