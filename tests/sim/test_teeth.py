"""The histories bite: each rule, broken on purpose, makes one of the first 500 fail; unbroken the same one passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import scheduler.cache_manager
import scheduler.planner
import scheduler.replica
import tests.sim.worker
import worker.batch
from protocol.arrays import unpack
from protocol.digest import TableDigest
from protocol.messages import SchedulerOutput
from protocol.windows import first_live_block
from tests.sim.cluster import play
from tests.sim.worker import SimulatedWorker
from worker.batch import InputBatch, StepInputs

HISTORIES = 500

Patch = pytest.MonkeyPatch


def publish_by_plan_alone(patch: Patch) -> None:
    patch.setattr(scheduler.replica, "publish_limit", lambda committed, planned: planned)


def publish_by_commit_alone(patch: Patch) -> None:
    patch.setattr(scheduler.replica, "publish_limit", lambda committed, planned: committed)


def admit_with_a_token_in_flight(patch: Patch) -> None:
    patch.setattr(scheduler.planner, "may_admit", lambda request: True)


def hits_without_owner_count_as_no_need(patch: Patch) -> None:
    patch.setattr(scheduler.cache_manager, "blocks_to_revive", lambda hit: 0)


def rows_at_their_limit_are_planned_once_more(patch: Patch) -> None:
    patch.setattr(scheduler.planner, "rows_at_limit", lambda rows: np.zeros(0, dtype=np.int64))


def recovery_forgets_requests_without_a_row(patch: Patch) -> None:
    patch.setattr(scheduler.replica, "bound_requests", lambda replica: replica.rows.running())


def digest_without_positions(patch: Patch) -> None:
    blind = partial(TableDigest, include_positions=False)
    patch.setattr(scheduler.replica, "TableDigest", blind)
    patch.setattr(worker.batch, "TableDigest", blind)


def window_fronts_one_block_early(patch: Patch) -> None:
    def early(position, window: int, block_size: int):
        return first_live_block(position + block_size, window, block_size)

    patch.setattr(scheduler.planner, "first_live_block", early)
    patch.setattr(worker.batch, "first_live_block", early)


def rows_attend_before_all_are_written(patch: Patch) -> None:
    def row_after_row(simulated: SimulatedWorker, inputs: StepInputs, tables: list[list[list[int]]]) -> None:
        for place in range(len(inputs.rows)):
            simulated.write(inputs, place)
            simulated.attend(inputs, tables, place)

    patch.setattr(tests.sim.worker, "forward", row_after_row)


def plan_applied_admissions_first(patch: Patch) -> None:
    def admissions_first(batch: InputBatch, plan: SchedulerOutput) -> None:
        for request in plan.admit:
            batch._admit(request)
        for row in unpack(plan.finish_rows).tolist():
            batch._finish(row)
        batch._drop_fronts()
        batch._grow(plan)

    patch.setattr(InputBatch, "_apply_changes", admissions_first)


BREAKS = (
    publish_by_plan_alone,
    publish_by_commit_alone,
    admit_with_a_token_in_flight,
    hits_without_owner_count_as_no_need,
    rows_at_their_limit_are_planned_once_more,
    recovery_forgets_requests_without_a_row,
    digest_without_positions,
    window_fronts_one_block_early,
    rows_attend_before_all_are_written,
    plan_applied_admissions_first,
)


def first_failure() -> tuple[int, Exception] | None:
    """The first of the histories that fails, and how."""
    for seed in range(HISTORIES):
        try:
            play(seed)
        except Exception as error:
            return seed, error
    return None


@pytest.mark.parametrize("break_rule", BREAKS, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_noticed(break_rule: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_rule(patch)
        failure = first_failure()
    assert failure is not None, f"{break_rule.__name__} went unnoticed in {HISTORIES} histories"
    seed, error = failure
    print(f"{break_rule.__name__}: history {seed}: {type(error).__name__}: {error}")
    play(seed)
