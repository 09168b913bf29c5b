"""Counters and histograms against requests whose every token comes at a known moment."""

from __future__ import annotations

import pytest

from protocol import messages as m
from protocol.arrays import pack
from protocol.histograms import BOUNDS, STAGES
from scheduler import events as e
from scheduler.histogram import Histogram
from tests.scheduler.deployment import Deployment, greedy


def step_at(deployment: Deployment, now: float, replica: int = 0) -> None:
    """The result of the oldest plan arrives at `now`."""
    deployment.now = now
    deployment.step(replica)


def snapshot(deployment: Deployment) -> m.MetricsSnapshot:
    actions = deployment.handle(e.FromClient(b"watcher", m.GetMetrics()))
    answers = [a.message for a in actions if isinstance(a, e.ToClient) and isinstance(a.message, m.MetricsSnapshot)]
    assert len(answers) == 1
    return answers[0]


def histogram(deployment: Deployment, name: str, replica: int = 0) -> m.HistogramData:
    return snapshot(deployment).replicas[replica].histograms[name]


def ended(snapshot: m.MetricsSnapshot) -> dict[str, int]:
    """The reasons that occurred."""
    return {reason: count for reason, count in snapshot.finished.items() if count}


def values(data: m.HistogramData) -> tuple[int, float]:
    return sum(data.counts), pytest.approx(data.sum)


def test_a_histogram_counts_one_by_one_as_it_counts_arrays() -> None:
    import numpy as np

    seen = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    one, many = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in seen:
        one.observe(float(value))
    many.observe_all(seen)
    many.observe_all(seen[:0])
    assert one.data == many.data == m.HistogramData((2, 2, 2), 10.5), "borders are inclusive"


def test_latencies_of_a_request_are_those_of_its_tokens() -> None:
    deployment = Deployment(pipeline_depth=1)
    deployment.now = 10.0
    deployment.submit("a", [5] * 6, greedy(max_tokens=4))
    for now in (10.5, 10.75, 11.0, 12.0):
        step_at(deployment, now)
    assert deployment.finished["a"].reason == "length"
    assert values(histogram(deployment, "request_queue_time_seconds")) == (1, 0.0)
    assert values(histogram(deployment, "time_to_first_token_seconds")) == (1, 0.5)
    assert values(histogram(deployment, "request_prefill_time_seconds")) == (1, 0.5)
    assert values(histogram(deployment, "inter_token_latency_seconds")) == (3, 1.5)
    assert values(histogram(deployment, "request_decode_time_seconds")) == (1, 1.5)
    assert values(histogram(deployment, "e2e_request_latency_seconds")) == (1, 2.0)
    assert values(histogram(deployment, "request_prompt_tokens")) == (1, 6)
    assert values(histogram(deployment, "request_generation_tokens")) == (1, 4)
    assert values(histogram(deployment, "iteration_tokens")) == (4, 6 + 3)


def test_a_request_that_waits_shows_it_as_queue_time() -> None:
    deployment = Deployment(max_num_seqs=1, pipeline_depth=1)
    deployment.submit("first", [5] * 4, greedy(max_tokens=2))
    deployment.submit("second", [6] * 4, greedy(max_tokens=1))
    for now in (1.0, 3.0, 4.0):
        step_at(deployment, now)
    data = histogram(deployment, "request_queue_time_seconds")
    assert values(data) == (2, 3.0)
    assert values(histogram(deployment, "time_to_first_token_seconds")) == (2, 1.0 + 4.0)


def test_counters_are_exact_and_a_recovery_neither_loses_nor_doubles_them() -> None:
    deployment = Deployment(replicas=2)
    deployment.submit("a", [5] * 9, greedy(max_tokens=6))
    for now in (1.0, 2.0):
        step_at(deployment, now)
    victim = next(r.replica for r in snapshot(deployment).status.replicas if r.running)
    deployment.now = 3.0
    deployment.kill(victim)
    deployment.now = 7.0
    deployment.run()
    found = snapshot(deployment)
    assert ended(found) == {"length": 1}
    assert sum(replica.prompt_tokens for replica in found.replicas) == 9
    assert sum(replica.generated_tokens for replica in found.status.replicas) == 6
    assert [replica.recoveries for replica in found.status.replicas] == [int(i == victim) for i in range(2)]
    gaps = [replica.histograms["inter_token_latency_seconds"] for replica in found.replicas]
    assert sum(sum(data.counts) for data in gaps) == 5
    assert sum(data.sum for data in gaps) == pytest.approx(6.0), "the pause of the recovery is between two tokens"
    firsts = [replica.histograms["time_to_first_token_seconds"] for replica in found.replicas]
    assert sum(sum(data.counts) for data in firsts) == 1


def test_what_is_aborted_counts_by_its_reason_and_says_nothing_about_latency() -> None:
    deployment = Deployment()
    deployment.submit("left", [5] * 4, greedy(max_tokens=50))
    deployment.submit("content", [6] * 4, greedy(max_tokens=50))
    step_at(deployment, 1.0)
    deployment.handle(e.FromClient(b"client", m.Abort("left")))
    deployment.handle(e.FromClient(b"client", m.Abort("content", "stop")))
    assert deployment.finished["content"].reason == "stop"
    assert ended(snapshot(deployment)) == {"abort": 1, "stop": 1}
    assert values(histogram(deployment, "e2e_request_latency_seconds")) == (1, 1.0)


def test_late_tokens_of_a_draining_request_are_counted_too() -> None:
    deployment = Deployment(pipeline_depth=2)
    deployment.submit("a", [5] * 4, greedy(max_tokens=2))
    deployment.submit("b", [7] * 4, greedy(max_tokens=9))
    for now in range(1, 12):
        if not deployment.plans[deployment.worker().identity]:
            break
        step_at(deployment, float(now))
    assert set(deployment.finished) == {"a", "b"}
    count, _ = values(histogram(deployment, "inter_token_latency_seconds"))
    assert count == 1 + 8


def test_the_step_log_tells_where_the_time_of_a_step_went() -> None:
    deployment = Deployment(pipeline_depth=1)
    deployment.now = 1.0
    deployment.submit("a", [5] * 5, greedy(max_tokens=2))
    engine, worker = deployment.engine, deployment.worker()
    plan = deployment.plans[worker.identity].popleft()
    deployment.now = engine.now = 1.002
    engine.plan_encoded(worker.identity, plan, 321, 0.001)
    tokens = worker.run(plan)
    timings = pack([1000, 2000, 50_000, 4000, 7000])  # began at 1.010, so it ended at 1.067
    result = m.ModelRunnerOutput(0, 0, pack(tokens), plan.digest, timings, started_ns=1_010_000_000)
    deployment.now = 1.1
    deployment.handle(e.FromWorker(worker.identity, result))
    record = next(iter(engine.replicas[0].step_log))
    assert (record.number, record.num_tokens, record.num_running, record.num_sampling) == (1, 5, 1, 1)
    assert (record.num_prefill_tokens, record.num_committed, record.plan_bytes) == (5, 1, 321)
    seconds = {"schedule": 0.0, "encode": 0.001, "wire": 0.007, "apply": 0.001, "commit": 0.002, "forward": 0.05}
    seconds |= {"sample": 0.004, "return": 0.033, "result": 0.0}
    assert record.stages == pytest.approx(seconds), "3 ms of the way were spent on the step before"
    assert tuple(record.stages) == STAGES
    assert values(snapshot(deployment).replicas[0].stages["forward"]) == (1, 0.05)
    assert values(histogram(deployment, "plan_bytes")) == (1, 321)


def test_a_worker_with_another_clock_is_placed_midway() -> None:
    deployment = Deployment(pipeline_depth=1)
    deployment.submit("a", [5] * 5, greedy(max_tokens=1))
    engine, worker = deployment.engine, deployment.worker()
    plan = deployment.plans[worker.identity].popleft()
    engine.plan_encoded(worker.identity, plan, 321, 0.0)
    tokens = worker.run(plan)
    timings = pack([0, 0, 100_000, 0, 500_000])
    deployment.now = 0.3
    result = m.ModelRunnerOutput(0, 0, pack(tokens), plan.digest, timings, started_ns=77_000_000_000)
    deployment.handle(e.FromWorker(worker.identity, result))
    record = next(iter(engine.replicas[0].step_log))
    assert record.started_at == pytest.approx(0.1)
    assert (record.wire_s, record.return_s) == (pytest.approx(0.1), pytest.approx(0.1))


def test_steps_of_a_lost_worker_are_forgotten_and_the_log_goes_on_counting() -> None:
    deployment = Deployment(pipeline_depth=2)
    deployment.submit("a", [5] * 5, greedy(max_tokens=4))
    log = deployment.engine.replicas[0].step_log
    deployment.step()
    deployment.kill()
    assert log.lost() == [], "what was in flight is gone already"
    deployment.start()
    deployment.run()
    assert [record.number for record in log] == list(range(1, len(log) + 1))
    assert [record.epoch for record in log] == [0] + [1] * (len(log) - 1)
    assert [record.number for record in log.since(2)] == list(range(3, len(log) + 1))


def test_every_histogram_goes_over_the_wire() -> None:
    data = snapshot(Deployment()).replicas[0]
    assert set(data.histograms) == set(BOUNDS) and tuple(data.stages) == STAGES
    for name, bounds in BOUNDS.items():
        assert list(bounds) == sorted(set(bounds)) and len(data.histograms[name].counts) == len(bounds) + 1
