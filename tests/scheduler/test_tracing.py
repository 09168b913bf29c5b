"""A recording is a well-formed trace, and says of each request and step what really happened to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protocol import messages as m
from protocol.arrays import pack
from scheduler import events as e
from scheduler import tracing
from tests.scheduler.deployment import Deployment, greedy
from tests.trace_reader import Slice, Trace, read_pieces


def deployed(**settings: Any) -> Deployment:
    """Workers that are never taken for dead, whatever the clock says."""
    return Deployment(heartbeat_timeout_s=1e6, **settings)


class Listener:
    """One who records, and what came of it."""

    def __init__(self, deployment: Deployment, seconds: float = 100.0, name: str = "listener"):
        self.deployment, self.name = deployment, name
        deployment.handle(e.FromClient(name.encode(), m.StartTrace("t", seconds)))

    @property
    def chunks(self) -> list[m.TraceChunk]:
        return [
            action.message
            for action in self.deployment.actions
            if isinstance(action, e.ToClient)
            and action.identity == self.name.encode()
            and isinstance(action.message, m.TraceChunk)
        ]

    def read(self, at: float = 1000.0) -> Trace:
        """The whole recording, whose time is up by now."""
        self.deployment.now = at
        self.deployment.handle(e.Tick())
        chunks = self.chunks
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert {chunk.query_id for chunk in chunks} == {"t"}
        return read_pieces(b"".join(chunk.events for chunk in chunks))


def step_at(deployment: Deployment, now: float, kernel_calls: dict[str, int] | None = None, replica: int = 0) -> None:
    """The result of the oldest plan arrives at `now`; the worker spent 10 ms on it until 1 ms ago."""
    worker = deployment.worker(replica)
    plan = deployment.plans[worker.identity].popleft()
    tokens = pack(worker.run(plan))
    timings = pack([1000, 2000, 3000, 4000, 50_000])
    result = m.ModelRunnerOutput(
        plan.epoch,
        plan.step,
        tokens,
        plan.digest,
        timings,
        started_ns=round((now - 0.011) * 1e9),
        kernel_calls=kernel_calls or {},
    )
    deployment.now = now
    deployment.handle(e.FromWorker(worker.identity, result))


def story(phases: list[Slice]) -> list[tuple[str, int, float, float]]:
    """(name, depth, began, ended) in seconds."""
    return [(s.name, s.depth, round(s.ts / 1e6, 6), round(s.end / 1e6, 6)) for s in phases]


def workers_told(deployment: Deployment) -> list[bool]:
    return [
        action.message.on
        for action in deployment.actions
        if isinstance(action, e.ToWorker) and isinstance(action.message, m.CountKernels)
    ]


def test_a_request_goes_through_queue_prefill_and_decode() -> None:
    deployment = deployed(pipeline_depth=1, max_num_seqs=1)
    listener = Listener(deployment)
    deployment.now = 1.0
    deployment.submit("a", [5] * 6, greedy(max_tokens=3))
    deployment.submit("b", [6] * 6, greedy(max_tokens=2))
    for now in (2.0, 3.0, 4.0, 5.0, 6.0):
        step_at(deployment, now)
    trace = listener.read()
    assert story(trace.phases("a")) == [
        ("a", 0, 1.0, 4.0),
        ("queue", 1, 1.0, 1.0),
        ("prefill", 1, 1.0, 2.0),
        ("decode", 1, 2.0, 4.0),
    ]
    assert story(trace.phases("b"))[1:] == [("queue", 1, 1.0, 4.0), ("prefill", 1, 4.0, 5.0), ("decode", 1, 5.0, 6.0)]
    first = trace.phases("a")[0]
    assert first.args == {"prompt tokens": 6, "reason": "length", "output tokens": 3}


def test_a_step_is_shown_in_both_processes_with_its_kernels_and_arrows() -> None:
    deployment = deployed(pipeline_depth=1)
    listener = Listener(deployment)
    assert workers_told(deployment) == [True]
    deployment.now = 1.0
    deployment.submit("a", [5] * 6, greedy(max_tokens=1))
    worker = deployment.worker()
    plan = deployment.plans[worker.identity][0]
    deployment.engine.now = 1.002
    deployment.engine.plan_encoded(worker.identity, plan, 321, 0.001)
    step_at(deployment, 1.1, {"paged_attention": 2})
    trace = listener.read()
    assert trace.processes == {0: "scheduler (pid 0)", 1: "worker-0 (pid 1)", tracing.REQUESTS_PID: "requests"}
    (step,) = trace.named("step 0")
    assert step.args["kernel calls"] == {"paged_attention": 2} and step.args["tokens"] == 6
    inner = [trace.named(name)[0] for name in ("apply", "commit", "forward", "sample")]
    assert [piece.depth for piece in inner] == [1] * 4
    assert [round(piece.dur) for piece in inner] == [1000, 2000, 3000, 4000]
    assert round(step.ts) == 1_089_000 and round(step.dur) == 10_000
    (encode,) = trace.named("encode")
    assert (round(encode.ts), round(encode.dur), encode.args["bytes"]) == (1_001_000, 1000, 321)
    assert [len(trace.named(name)) for name in ("schedule", "result")] == [1, 1]
    wire = trace.asynchronous["wire", "0.0.0"]
    assert [piece.name for piece in wire] == ["behind the step before", "wire", "return"]
    assert [round(piece.dur / 1000, 3) for piece in wire] == [37.0, 50.0, 1.0], "87 ms, of which the worker idled 50"
    assert trace.arrows == 2
    assert trace.counters["blocks of replica 0"][-1]["in use"] == 0
    assert workers_told(deployment) == [True, False]


def test_a_preempted_request_returns_to_the_queue() -> None:
    deployment = deployed(num_blocks=7, pipeline_depth=1)
    listener = Listener(deployment)
    deployment.submit("old", [5] * 8, greedy(max_tokens=12))
    deployment.submit("new", [6] * 8, greedy(max_tokens=12))
    now = 0.0
    while deployment.plans[deployment.worker().identity]:
        now += 1.0
        step_at(deployment, now)
    assert deployment.engine.replicas[0].stats.preemptions == 1
    names = [piece.name for piece in listener.read().phases("new")]
    assert names == ["new", "queue", "prefill", "decode", "queue", "prefill", "decode"]


def test_a_recovery_spans_from_the_death_to_the_next_token() -> None:
    deployment = deployed(pipeline_depth=1)
    listener = Listener(deployment)
    deployment.submit("a", [5] * 6, greedy(max_tokens=4))
    step_at(deployment, 1.0)
    deployment.now = 2.0
    deployment.kill()
    deployment.now = 5.0
    deployment.start()
    step_at(deployment, 7.0)
    step_at(deployment, 8.0)
    step_at(deployment, 9.0)
    trace = listener.read()
    assert story(trace.phases("a"))[1:] == [
        ("queue", 1, 0.0, 0.0),
        ("prefill", 1, 0.0, 1.0),
        ("decode", 1, 1.0, 2.0),
        ("recovery", 1, 2.0, 7.0),
        ("queue", 2, 2.0, 5.0),
        ("prefill", 2, 5.0, 7.0),
        ("decode", 1, 7.0, 9.0),
    ]
    (lost,) = trace.marks["worker lost"]
    assert lost == {"worker": "worker-0", "replica": 0, "reason": "signal 9"}
    assert [joined["epoch"] for joined in trace.marks["worker joined"]] == [1]
    assert [piece[0].name for (kind, _), piece in trace.asynchronous.items() if kind == "lost"] == ["lost step 1"]
    assert workers_told(deployment)[:2] == [True, True], "the worker that joins is told too"


def test_who_begins_in_the_middle_sees_the_requests_that_are_there() -> None:
    deployment = deployed(pipeline_depth=1, max_num_seqs=1)
    deployment.submit("running", [5] * 6, greedy(max_tokens=5))
    deployment.submit("waiting", [6] * 6, greedy(max_tokens=1))
    step_at(deployment, 1.0)
    deployment.now = 2.0
    listener = Listener(deployment, seconds=1.5)
    step_at(deployment, 3.0)
    trace = listener.read(at=3.5)
    assert story(trace.phases("running")) == [("running", 0, 0.0, 3.5), ("decode", 1, 2.0, 3.5)]
    assert story(trace.phases("waiting")) == [("waiting", 0, 0.0, 3.5), ("queue", 1, 0.0, 3.5)]
    assert not deployment.engine.tracing.active
    seen = len(listener.chunks)
    deployment.run()
    assert len(listener.chunks) == seen and set(deployment.finished) == {"running", "waiting"}


def test_two_listeners_hear_the_same_and_the_first_to_end_leaves_the_other_alone() -> None:
    deployment = deployed(pipeline_depth=1)
    short, long = Listener(deployment, 2.0, "short"), Listener(deployment, 50.0, "long")
    deployment.submit("a", [5] * 6, greedy(max_tokens=6))
    for now in range(1, 7):
        step_at(deployment, float(now))
    assert workers_told(deployment) == [True], "they are told once"
    assert short.chunks[-1].last and not long.chunks[-1].last
    early = read_pieces(b"".join(chunk.events for chunk in short.chunks))
    late = long.read()
    assert len(early.named("sample")) < len(late.named("sample")) == 6
    assert workers_told(deployment) == [True, False]


def test_a_listener_that_leaves_is_forgotten() -> None:
    deployment = deployed()
    Listener(deployment)
    deployment.handle(e.ClientGone(b"listener"))
    assert not deployment.engine.tracing.active and workers_told(deployment) == [True, False]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 601.0, float("nan"), float("inf")])
def test_a_trace_of_no_or_endless_length_is_refused(seconds: float) -> None:
    deployment = deployed()
    Listener(deployment, seconds)
    assert deployment.rejected["t"].param == "seconds" and not deployment.engine.tracing.active


def test_more_listeners_than_there_may_be_are_refused() -> None:
    deployment = deployed()
    for number in range(tracing.MOST_RECORDINGS + 1):
        Listener(deployment, name=f"listener {number}")
    assert deployment.rejected["t"].code == "overloaded"


def test_a_recording_that_grows_too_large_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_BYTES", 4000)
    deployment = deployed(pipeline_depth=1)
    listener = Listener(deployment)
    deployment.submit("a", [5] * 6, greedy(max_tokens=40))
    now = 0.0
    while not any(chunk.last for chunk in listener.chunks):
        now += 1.0
        step_at(deployment, now)
    assert now < 10 and not deployment.engine.tracing.active
    read_pieces(b"".join(chunk.events for chunk in listener.chunks))


def test_the_file_of_a_deployment_is_recorded_from_beginning_to_end() -> None:
    deployment = deployed(start=False)
    deployment.engine.trace_to_file(0.0)
    deployment.start()
    deployment.submit("a", [5] * 6, greedy(max_tokens=3))
    deployment.now = 3.0
    deployment.run()
    deployment.handle(e.Tick())
    written = [action for action in deployment.actions if isinstance(action, e.WriteTrace)]
    assert written and not any(action.last for action in written)
    written += [action for action in deployment.engine.end_traces(4.0) if isinstance(action, e.WriteTrace)]
    assert [action.last for action in written] == [False] * (len(written) - 1) + [True]
    trace = read_pieces(b"".join(action.events for action in written))
    assert trace.phases("a")[0].args["output tokens"] == 3
    assert len(trace.named("sample")) == len(deployment.engine.replicas[0].step_log)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_whatever_happens_the_trace_is_well_formed(data: st.DataObject) -> None:
    deployment = deployed(
        replicas=2,
        num_blocks=data.draw(st.integers(8, 20)),
        windows=data.draw(st.sampled_from([(0,), (0, 6)])),
        max_num_seqs=3,
        max_num_batched_tokens=8,
    )
    names: list[str] = []
    listener: Listener | None = None
    begin_at = data.draw(st.integers(0, 15))
    for turn in range(25):
        deployment.now += 1.0
        if turn == begin_at:
            listener = Listener(deployment, 600.0)
        match data.draw(st.sampled_from(["submit", "step", "step", "step", "abort", "die", "live"])):
            case "submit":
                names.append(f"r{len(names)}")
                deployment.submit(names[-1], [7] * data.draw(st.integers(1, 16)), greedy(data.draw(st.integers(1, 9))))
            case "step":
                for worker in list(deployment.workers):
                    if worker is not None and deployment.plans[worker.identity]:
                        step_at(deployment, deployment.now, replica=worker.replica)
            case "abort" if names:
                deployment.abort(data.draw(st.sampled_from(names)))
            case "die":
                replica = data.draw(st.integers(0, 1))
                if deployment.workers[replica] is not None:
                    deployment.kill(replica)
            case "live":
                for replica, worker in enumerate(deployment.workers):
                    if worker is None:
                        deployment.start(replica)
    for replica, worker in enumerate(deployment.workers):
        if worker is None:
            deployment.start(replica)
    assert listener is not None
    trace = listener.read(at=5000.0)
    shown = {pieces[0].name for (kind, _), pieces in trace.asynchronous.items() if kind == "request"}
    assert set(deployment.engine.requests) <= shown <= set(names)
