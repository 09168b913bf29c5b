"""A profile is asked of one worker, at most one at a time, and whoever waits hears of it in any case."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import messages as m
from scheduler import events as e
from scheduler.profiles import PATIENCE_S
from tests.scheduler.deployment import Deployment

PROFILE = m.Profile(3, 12_000, "cpu", (m.KernelShare("gemm", 6, 9000), m.KernelShare("softmax", 3, 1000)))


def deployed(**settings: Any) -> Deployment:
    return Deployment(heartbeat_timeout_s=1e6, **settings)


def ask(deployment: Deployment, query: str = "q", replica: int = 0, steps: int = 3, seconds: float = 10.0) -> None:
    deployment.handle(e.FromClient(b"asker", m.StartProfile(query, replica, steps, seconds)))


def told(deployment: Deployment) -> list[int]:
    """What the workers were told to profile."""
    sent = [action.message for action in deployment.actions if isinstance(action, e.ToWorker)]
    return [message.steps for message in sent if isinstance(message, m.ProfileSteps)]


def reports(deployment: Deployment) -> list[m.ProfileReport]:
    sent = [action.message for action in deployment.actions if isinstance(action, e.ToClient)]
    return [message for message in sent if isinstance(message, m.ProfileReport)]


def answer(deployment: Deployment, replica: int = 0, epoch: int = 0) -> None:
    worker = deployment.worker(replica)
    deployment.handle(e.FromWorker(worker.identity, m.ProfileResult(epoch, PROFILE)))


def test_what_the_worker_found_reaches_who_asked_once() -> None:
    deployment = deployed(replicas=2)
    ask(deployment, replica=1)
    answer(deployment, replica=1)
    answer(deployment, replica=1)
    assert told(deployment) == [3]
    assert reports(deployment) == [m.ProfileReport("q", "worker-1", PROFILE)]


def test_a_second_one_is_refused_until_the_first_is_done() -> None:
    deployment = deployed(replicas=2)
    ask(deployment, "first")
    ask(deployment, "second")
    ask(deployment, "elsewhere", replica=1)
    assert deployment.rejected["second"].code == "overloaded" and "worker-0" in deployment.rejected["second"].message
    answer(deployment)
    ask(deployment, "third")
    assert set(deployment.rejected) == {"second"} and told(deployment) == [3, 3, 3]


def test_a_death_is_reported_and_the_next_worker_can_be_profiled() -> None:
    deployment = deployed()
    ask(deployment)
    old = deployment.kill()
    assert deployment.rejected["q"].code == "worker_lost" and "signal 9" in deployment.rejected["q"].message
    ask(deployment, "while it is down")
    assert deployment.rejected["while it is down"].code == "worker_lost"
    deployment.start()
    ask(deployment, "again")
    deployment.handle(e.FromWorker(old.identity, m.ProfileResult(0, PROFILE)))
    assert reports(deployment) == [], "a dead worker's word counts for nothing"
    answer(deployment, epoch=1)
    assert [report.query_id for report in reports(deployment)] == ["again"]


def test_when_the_time_is_up_the_worker_is_told_once_to_report_what_it_has() -> None:
    deployment = deployed()
    ask(deployment, seconds=10.0)
    for now in (9.0, 10.0, 11.0):
        deployment.now = now
        deployment.handle(e.Tick())
    assert told(deployment) == [3, 0]
    answer(deployment)
    assert len(reports(deployment)) == 1


def test_a_worker_that_never_reports_is_given_up() -> None:
    deployment = deployed()
    ask(deployment, seconds=10.0)
    for now in (10.0, 10.0 + PATIENCE_S):
        deployment.now = now
        deployment.handle(e.Tick())
    assert deployment.rejected["q"].code == "worker_lost"
    ask(deployment, "again")
    assert "again" not in deployment.rejected


@pytest.mark.parametrize(
    ("field", "value"),
    [("replica", 1), ("replica", -1), ("steps", 0), ("steps", 1001), ("seconds", 0.0), ("seconds", float("nan"))],
)
def test_what_cannot_be_done_is_refused_by_name(field: str, value: Any) -> None:
    deployment = deployed()
    ask(deployment, **{field: value})
    assert deployment.rejected["q"].param == field and told(deployment) == []
