"""Workers die, hang, diverge and come back; what they still say; and that no stream shows any of it."""

from __future__ import annotations

import pytest

from protocol import messages as m
from protocol.arrays import pack
from scheduler import events as e
from tests.scheduler.deployment import Deployment, greedy, hello_of
from tests.sim.worker import SimulatedWorker

TOKENS = 12


def clean_run(sampling: m.SamplingParams) -> Deployment:
    deployment = Deployment()
    deployment.submit("r", list(range(10)), sampling)
    deployment.run()
    return deployment


@pytest.mark.parametrize("delivered", [0, 1, TOKENS // 2, TOKENS - 1])
@pytest.mark.parametrize("sampling", [greedy(TOKENS), m.SamplingParams(max_tokens=TOKENS, seed=7, ignore_eos=True)])
def test_a_stream_and_its_usage_are_those_of_an_unkilled_run(delivered: int, sampling: m.SamplingParams) -> None:
    deployment = Deployment()
    deployment.submit("r", list(range(10)), sampling)
    while len(deployment.tokens["r"]) < delivered:
        deployment.step()
    deployment.kill()
    assert len(deployment.tokens["r"]) == delivered and "r" not in deployment.finished
    deployment.start()
    deployment.run()
    unkilled = clean_run(sampling)
    assert deployment.tokens["r"] == unkilled.tokens["r"] == deployment.golden("r")
    assert deployment.finished["r"] == unkilled.finished["r"]
    assert deployment.finished["r"].usage == m.Usage(prompt_tokens=10, completion_tokens=TOKENS, cached_tokens=0)
    deployment.check_idle()


def test_twenty_deaths_in_a_row_lose_and_repeat_nothing() -> None:
    deployment = Deployment(replicas=2)
    for number in range(6):
        deployment.submit(f"r{number}", [number, 5, 6], greedy(30))
    for death in range(20):
        replica = death % 2
        if deployment.plans[deployment.worker(replica).identity]:
            deployment.step(replica)
        deployment.kill(replica)
        deployment.start(replica)
    deployment.run()
    for number in range(6):
        assert deployment.tokens[f"r{number}"] == deployment.golden(f"r{number}")
    assert sum(replica.stats.recoveries for replica in deployment.engine.replicas) == 20
    deployment.check_idle()


def test_requests_go_on_at_the_living_replica() -> None:
    deployment = Deployment(replicas=2)
    for name in ("a", "b"):
        deployment.submit(name, [1, 2, 3])
    deployment.step(0)
    deployment.kill(0)
    deployment.run()
    for name in ("a", "b"):
        assert deployment.tokens[name] == deployment.golden(name)
    assert deployment.engine.replicas[0].epoch == 1 and not deployment.engine.replicas[0].ready
    deployment.check_idle()


def test_a_request_whose_last_token_was_in_flight_is_recovered() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(1))  # its only token is in flight, row and blocks are released
    deployment.submit("s", [1, 2, 3], greedy(8))
    deployment.step()
    deployment.submit("t", [4, 5, 6], greedy(1))
    deployment.kill()
    deployment.start()
    deployment.run()
    for name in "rst":
        assert deployment.tokens[name] == deployment.golden(name)
    deployment.check_idle()


def test_a_request_is_over_when_its_last_token_arrived_although_the_worker_dies() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(2))
    deployment.run()
    deployment.kill()
    assert deployment.finished["r"].reason == "length" and deployment.tokens["r"] == deployment.golden("r")


# --------------------------------------------------------------------------------------------- messages too late


def test_a_result_for_an_aborted_request_changes_nothing() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(20))
    deployment.step()
    deployment.run_plan()
    deployment.abort("r")
    assert deployment.finished["r"].reason == "abort"
    assert deployment.finished["r"].usage.completion_tokens == len(deployment.tokens["r"]) == 1
    deployment.run()
    assert len(deployment.tokens["r"]) == 1
    deployment.check_idle()


def test_a_row_given_away_while_its_old_token_is_in_flight_gets_only_its_own() -> None:
    deployment = Deployment(max_num_seqs=1, max_num_batched_tokens=16)
    deployment.submit("old", [1, 2, 3], greedy(20))
    deployment.step()
    deployment.submit("new", [4, 5, 6], greedy(5))
    deployment.abort("old")
    deployment.run()
    assert deployment.tokens["new"] == deployment.golden("new")
    deployment.check_idle()


def test_what_a_dead_worker_said_last_is_dropped_and_counted() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3])
    deployment.step()
    late = deployment.run_plan()
    dead = deployment.kill()
    deployment.start()
    before = list(deployment.tokens["r"])
    actions = deployment.handle(e.FromWorker(dead.identity, late))
    assert actions == [] and deployment.tokens["r"] == before
    assert deployment.engine.replicas[0].stats.fenced_messages == 1
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")
    deployment.check_idle()


def test_a_result_of_an_old_epoch_under_the_new_identity_is_dropped() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3])
    late = deployment.run_plan()
    deployment.kill()
    deployment.start()
    worker = deployment.worker()
    assert late.epoch == 0
    deployment.handle(e.FromWorker(worker.identity, late))
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_second_incarnation_takes_the_place_of_the_first() -> None:
    """The first one's death was not noticed yet: it is fenced, and its process is to be killed."""
    deployment = Deployment()
    deployment.engine.watchers.add(b"supervisor")
    deployment.submit("r", [1, 2, 3])
    deployment.step()
    old = deployment.worker()
    deployment.start()
    kills = [a.message for a in deployment.actions if isinstance(a, e.ToSupervisor)]
    assert [k.incarnation for k in kills if isinstance(k, m.KillWorker)] == [old.incarnation]
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_plan_that_cannot_be_sent_is_a_death() -> None:
    deployment = Deployment(replicas=2)
    deployment.submit("r", [1, 2, 3])
    worker = deployment.worker()
    deployment.workers[0] = None
    deployment.handle(e.WorkerUnreachable(worker.identity, "no route"))
    assert not deployment.engine.replicas[0].ready
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_the_notice_of_a_death_that_was_dealt_with_changes_nothing() -> None:
    deployment = Deployment()
    old = deployment.kill()
    deployment.start()
    exited = m.WorkerExited(old.worker_id, old.incarnation, "signal 9")
    assert deployment.handle(e.FromSupervisor(b"supervisor", exited)) == []
    assert deployment.engine.replicas[0].ready


# ----------------------------------------------------------------------------------------------- silence and divergence


def test_a_slow_step_is_no_death_while_the_worker_beats() -> None:
    deployment = Deployment(heartbeat_timeout_s=3.0)
    deployment.submit("r", [1, 2, 3])
    worker = deployment.worker()
    for second in range(1, 30):
        deployment.now = float(second)
        deployment.handle(e.FromWorker(worker.identity, m.Heartbeat(worker.worker_id, worker.incarnation, "ready")))
        deployment.handle(e.Tick())
    assert deployment.engine.replicas[0].ready
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_what_heartbeats_tell_of_work_adds_up_over_incarnations() -> None:
    deployment = Deployment()

    def tell(*items: int) -> tuple[int, int]:
        worker = deployment.worker()
        beat = m.Heartbeat(worker.worker_id, worker.incarnation, "ready", *items)
        deployment.handle(e.FromWorker(worker.identity, beat))
        metrics = deployment.engine.metrics(0.0).replicas[0]
        return metrics.work_items, metrics.borrowed_items

    assert tell(10, 2) == (10, 2)
    assert tell(15, 2) == (15, 2)
    deployment.kill()
    deployment.start()
    assert tell(7, 1) == (22, 3)


def test_a_silent_worker_is_fenced_and_a_late_awakening_repeats_no_token() -> None:
    deployment = Deployment(heartbeat_timeout_s=3.0)
    deployment.engine.watchers.add(b"supervisor")
    deployment.submit("r", [1, 2, 3])
    deployment.step()
    late = deployment.run_plan()
    stopped = deployment.worker()
    deployment.now = 2.9
    deployment.handle(e.Tick())
    assert deployment.engine.replicas[0].ready
    deployment.now = 3.1
    actions = deployment.handle(e.Tick())
    kills = [a.message for a in actions if isinstance(a, e.ToSupervisor) and isinstance(a.message, m.KillWorker)]
    assert len(kills) == 1 and "no sign of life" in kills[0].reason
    deployment.start()
    deployment.handle(e.FromWorker(stopped.identity, late))
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")
    deployment.check_idle()


def result_with(result: m.ModelRunnerOutput, **changes: object) -> m.ModelRunnerOutput:
    return m.ModelRunnerOutput(**{**{name: getattr(result, name) for name in result.__struct_fields__}, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": 1}, "digest 0x1 instead of"),
        ({"tokens": pack([1, 2])}, "2 tokens instead of 1"),
        ({"tokens": b""}, "0 tokens instead of 1"),
        ({"tokens": b"123"}, "3 bytes are no int32 array"),
        ({"tokens": pack([1000])}, "token 1000 is outside the vocabulary"),
        ({"step": 7}, "result of step 7 instead of 0"),
    ],
)
def test_a_worker_that_disagrees_is_fenced_and_the_stream_goes_on(changes: dict, problem: str) -> None:
    deployment = Deployment()
    deployment.engine.watchers.add(b"supervisor")
    deployment.submit("r", [1, 2, 3])
    worker = deployment.worker()
    result = result_with(deployment.run_plan(), **changes)
    actions = deployment.handle(e.FromWorker(worker.identity, result))
    records = [action for action in actions if isinstance(action, e.WriteFlightRecord)]
    assert len(records) == 1 and problem in records[0].reason and len(records[0].plans) == 2
    kills = [a.message for a in actions if isinstance(a, e.ToSupervisor) and isinstance(a.message, m.KillWorker)]
    assert [kill.incarnation for kill in kills] == [worker.incarnation]
    deployment.start()
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")
    deployment.check_idle()


def test_a_result_nobody_asked_for_is_divergence() -> None:
    deployment = Deployment()
    worker = deployment.worker()
    actions = deployment.handle(e.FromWorker(worker.identity, m.ModelRunnerOutput(0, 0, b"", 0, b"")))
    assert any(isinstance(action, e.WriteFlightRecord) for action in actions)
    assert not deployment.engine.replicas[0].ready


def test_a_refused_plan_fences_the_worker_that_refused_it() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3])
    worker = deployment.worker()
    refused = m.PlanRefused(epoch=0, step=0, reason="digest", expected=1, actual=2)
    actions = deployment.handle(e.FromWorker(worker.identity, refused))
    records = [action for action in actions if isinstance(action, e.WriteFlightRecord)]
    assert "plan 0 refused: digest (expected 0x1, has 0x2)" in records[0].reason
    deployment.start()
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_failed_row_ends_its_request_and_nothing_it_computed_is_found() -> None:
    deployment = Deployment(nan_per_1000=1000)
    deployment.submit("r", list(range(20)))
    deployment.run()
    assert deployment.finished["r"].reason == "error" and "NaN" in deployment.finished["r"].message
    assert deployment.tokens["r"] == [] and deployment.engine.replicas[0].manager.pool.num_cached == 0
    deployment.scenario.nan_per_1000 = 0
    deployment.submit("s", list(range(20)))
    deployment.run()
    assert deployment.cached("s") == 0 and deployment.tokens["s"] == deployment.golden("s")
    deployment.check_idle()


# ----------------------------------------------------------------------------------------------------- the handshake


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_fingerprint": "other"}, ("model fingerprint", "other")),
        ({"block_size": 8}, ("block_size", "8", "4")),
        ({"groups": ()}, ("cache groups",)),
        ({"max_model_len": 17}, ("max_model_len", "17", "256")),
        ({"max_num_seqs": 3}, ("max_num_seqs", "3", "8")),
        ({"tp_size": 2}, ("tp_size", "2", "1")),
        ({"rank": 1}, ("rank", "1", "0")),
        ({"replica": 5}, ("replica", "5", "0 to 0")),
        ({"replica": -1}, ("replica", "-1")),
        ({"num_blocks": 1}, ("num_blocks", "1", "2")),
    ],
)
def test_a_worker_that_does_not_match_is_refused_with_both_values(changes: dict, named: tuple[str, ...]) -> None:
    deployment = Deployment(start=False)
    worker = SimulatedWorker(deployment.scenario, 0, 1)
    (action, *_) = deployment.handle(e.FromWorker(worker.identity, hello_of(worker, **changes)))
    assert isinstance(action, e.ToWorker) and isinstance(action.message, m.Refused)
    assert all(word in action.message.reason for word in ("worker-0", *named))
    assert not deployment.engine.replicas[0].ready and not deployment.engine.workers
    deployment.start()
    assert deployment.engine.replicas[0].ready


def test_a_shutdown_ends_every_request_and_tells_everyone() -> None:
    deployment = Deployment()
    for name in ("a", "b"):
        deployment.submit(name, [1, 2, 3])
    actions = deployment.handle(e.FromSupervisor(b"supervisor", m.Shutdown()))
    assert {name: finished.reason for name, finished in deployment.finished.items()} == {"a": "abort", "b": "abort"}
    assert isinstance(actions[-1], e.Exit)
    assert any(isinstance(a, e.ToWorker) and isinstance(a.message, m.StopWorker) for a in actions)
    deployment.submit("late", [1])
    assert deployment.rejected["late"].code == "shutting_down"
    deployment.check_idle()
