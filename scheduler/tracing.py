"""Records what happens, while somebody asks for it: each step across processes, each request through its phases.

The engine tells of every event; while nobody records, that costs a look at an empty list. A recording is chunks of
Chrome's trace events (`scheduler.trace_events`), given out once a second or when they are large; its total is bounded.
Pure: moments are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages import FinishReason, Hello
from scheduler import trace_events as t
from scheduler.replica import Replica
from scheduler.request import Request, RequestState
from scheduler.step_log import StepRecord

MOST_RECORDINGS = 4
MOST_BYTES = 64 * 1024 * 1024
"""Of a recording that goes to a client; then it ends."""
CHUNK_BYTES = 64 * 1024

REQUESTS_PID = 2**31 - 2
"""A process that there is not: its tracks are the requests."""
MOST_REPLICAS = 4096
"""Keeps the numbers of arrows apart."""
LOOP, STEPS, OVERLAPPED = 1, 1, 2
"""Threads: the scheduler's loop; a worker's steps, those that overlap with the one before in a second lane."""


@dataclass(eq=False)
class Recording:
    """One who listens. client: None for the file of the deployment."""

    client: bytes | None
    query_id: str
    ends_at: float
    pending: bytearray = field(default_factory=bytearray)
    total: int = 0
    given_at: float = 0.0


class Chunk(NamedTuple):
    """Events to hand over; `last`: nothing follows."""

    recording: Recording
    events: bytes
    last: bool


class _Slice(NamedTuple):
    name: str
    began: float
    args: t.Arguments


class Tracing:
    """All recordings of one scheduler. pid: the scheduler's process."""

    def __init__(self, pid: int):
        self.pid = pid
        self._recordings: list[Recording] = []
        self._processes: dict[int, bytes] = {}
        """By pid: the names of a process and its threads, for recordings that begin later."""
        self._lanes: dict[int, float] = {}
        """By a worker's pid: where the last slice of its first lane ends."""
        self._open: dict[int, list[_Slice]] = {}
        """By arrival: the open slices of a request, the outermost first. Empty while nobody records."""
        self._prefilling: dict[int, Request] = {}
        self.new_process(pid, "scheduler", {LOOP: "loop"}, 0)
        self.new_process(REQUESTS_PID, "requests", {}, 1)

    @property
    def active(self) -> bool:
        """Whether anybody records."""
        return bool(self._recordings)

    # ------------------------------------------------------------------------------------------------- recordings

    def start(self, recording: Recording, requests: Iterable[Request], now: float) -> None:
        """Record from now on; `requests`: all that are unfinished."""
        if not self.active:
            for request in requests:
                self._catch_up(request, now)
        recording.given_at = now
        recording.pending += b"".join(self._processes.values())
        for arrival, slices in self._open.items():
            for part in slices:
                recording.pending += t.begin(REQUESTS_PID, "request", part.name, str(arrival), part.began, part.args)
        self._recordings.append(recording)

    def is_full(self) -> bool:
        """Whether nobody else may record now."""
        return len(self._recordings) >= MOST_RECORDINGS

    def forget(self, client: bytes) -> None:
        """This client is gone."""
        self._recordings = [recording for recording in self._recordings if recording.client != client]
        self._rest()

    def due(self, now: float) -> list[Chunk]:
        """What is to be handed over now; recordings whose time is up end with it."""
        chunks = []
        for recording in list(self._recordings):
            over = now >= recording.ends_at or (recording.client is not None and recording.total >= MOST_BYTES)
            if over:
                chunks.append(self._end(recording, now))
            elif len(recording.pending) >= CHUNK_BYTES or (recording.pending and now - recording.given_at >= 1.0):
                chunks.append(self._take(recording, now, last=False))
        return chunks

    def end_all(self, now: float) -> list[Chunk]:
        """The scheduler is about to end."""
        return [self._end(recording, now) for recording in list(self._recordings)]

    def _end(self, recording: Recording, now: float) -> Chunk:
        for arrival, slices in self._open.items():
            for part in reversed(slices):
                recording.pending += t.end(REQUESTS_PID, "request", part.name, str(arrival), now)
        self._recordings.remove(recording)
        self._rest()
        return self._take(recording, now, last=True)

    def _take(self, recording: Recording, now: float, last: bool) -> Chunk:
        events = bytes(recording.pending)
        recording.pending.clear()
        recording.total += len(events)
        recording.given_at = now
        return Chunk(recording, events, last)

    def _rest(self) -> None:
        if not self.active:
            self._open.clear()
            self._prefilling.clear()
            self._lanes.clear()

    def _emit(self, *events: bytes) -> None:
        for recording in self._recordings:
            for event in events:
                recording.pending += event

    # -------------------------------------------------------------------------------------------------- processes

    def new_process(self, pid: int, name: str, threads: Mapping[int, str], order: int) -> None:
        self._processes[pid] = t.process(pid, f"{name} (pid {pid})" if pid != REQUESTS_PID else name, threads, order)
        self._emit(self._processes[pid])

    def worker_joined(self, hello: Hello, epoch: int, now: float) -> None:
        """A worker serves; its predecessor's names are only kept by recordings that have them."""
        self.new_process(hello.pid, hello.worker_id, {STEPS: "steps", OVERLAPPED: "overlapped"}, 10 + hello.replica)
        if self.active:
            args = {"worker": hello.worker_id, "replica": hello.replica, "epoch": epoch}
            self._emit(t.mark(self.pid, LOOP, "worker joined", now, args))

    def worker_lost(
        self, hello: Hello, reason: str, void: Iterable[StepRecord], bound: Iterable[Request], now: float
    ) -> None:
        """A worker is gone, its steps in flight are void, and the requests bound to it begin to recover."""
        self._processes.pop(hello.pid, None)
        if not self.active:
            return
        args = {"worker": hello.worker_id, "replica": hello.replica, "reason": reason}
        self._emit(t.mark(self.pid, LOOP, "worker lost", now, args))
        for record in void:
            key = f"{hello.replica}.{record.epoch}.{record.step}"
            sent = record.sent_at or record.planned_at + record.schedule_s
            self._emit(
                *self._scheduler_side(hello.replica, record),
                t.begin(self.pid, "lost", f"lost step {record.step}", key, sent, args),
                t.end(self.pid, "lost", f"lost step {record.step}", key, now),
            )
        for request in bound:
            self._back_to_queue(request, now, recovering=True)

    # ------------------------------------------------------------------------------------------------------ steps

    def step_done(
        self, replica: Replica, hello: Hello, record: StepRecord, kernels: Mapping[str, int], now: float
    ) -> None:
        """A result counts. kernels: calls of each kernel in the step. now: as for requests, so that their phases follow
        one another also where several events are dealt with at one moment."""
        if not self.active:
            return
        pid, key = hello.pid, f"{replica.index}.{record.epoch}.{record.step}"
        started, ended = record.started_at, record.started_at + record.work_s
        lane = STEPS if started >= self._lanes.get(pid, 0.0) else OVERLAPPED
        if lane == STEPS:
            self._lanes[pid] = ended
        args = {
            "epoch": record.epoch,
            "step": record.step,
            "rows": record.num_running,
            "tokens": record.num_tokens,
            "prefill tokens": record.num_prefill_tokens,
            "sampling rows": record.num_sampling,
            "kernel calls": dict(kernels),
        }
        events = self._scheduler_side(replica.index, record)
        on_the_wire = started - record.wire_s
        if record.sent_at and on_the_wire > record.sent_at:
            events += [
                t.begin(pid, "wire", "behind the step before", key, record.sent_at),
                t.end(pid, "wire", "behind the step before", key, on_the_wire),
            ]
        events += [
            t.begin(pid, "wire", "wire", key, on_the_wire, {"bytes": record.plan_bytes}),
            t.end(pid, "wire", "wire", key, started),
            t.piece(pid, lane, f"step {record.step}", started, record.work_s, args),
        ]
        if record.rest_s:
            events.append(t.piece(pid, lane, "rest", started - record.rest_s, record.rest_s))
        at = started
        for name in ("apply", "commit", "forward", "sample"):
            seconds = record.stages[name]
            events.append(t.piece(pid, lane, name, at, min(seconds, ended - at)))
            at += seconds
        arrow = record.number * 2 * MOST_REPLICAS + replica.index * 2
        events += [
            t.begin(pid, "wire", "return", key, ended),
            t.end(pid, "wire", "return", key, record.returned_at),
            t.piece(
                self.pid,
                LOOP,
                "result",
                record.returned_at,
                record.result_s,
                {"replica": replica.index, "step": record.step, "tokens": record.num_committed},
            ),
            t.arrow(arrow, (self.pid, LOOP, record.planned_at), (pid, lane, started)),
            t.arrow(arrow + 1, (pid, lane, ended), (self.pid, LOOP, record.returned_at)),
        ]
        pool = replica.manager.pool
        blocks = {"in use": pool.num_usable - pool.num_free, "free": pool.num_free}
        done_at = record.returned_at + record.result_s
        events += [
            t.counter(self.pid, f"blocks of replica {replica.index}", done_at, blocks),
            t.counter(self.pid, f"running in replica {replica.index}", done_at, {"rows": replica.rows.num_active}),
        ]
        self._emit(*events)
        self._look_for_first_tokens(replica, now)

    def _scheduler_side(self, replica: int, record: StepRecord) -> list[bytes]:
        args = {"replica": replica, "step": record.step, "epoch": record.epoch, "tokens": record.num_tokens}
        events = [t.piece(self.pid, LOOP, "schedule", record.planned_at, record.schedule_s, args)]
        if record.sent_at:
            began = record.sent_at - record.encode_s
            args = {"replica": replica, "step": record.step, "bytes": record.plan_bytes}
            events.append(t.piece(self.pid, LOOP, "encode", began, record.encode_s, args))
        return events

    # --------------------------------------------------------------------------------------------------- requests

    def submitted(self, request: Request, now: float) -> None:
        """A request was accepted and waits."""
        if self.active:
            self._begin(request, request.request_id, now, {"prompt tokens": request.prompt_len})
            self._begin(request, "queue", now)

    def admitted(self, request: Request, now: float) -> None:
        """It got a row."""
        if self.active and request.arrival in self._open:
            self._end_until(request, ("queue",), now)
            args = {"replica": request.replica, "row": request.row, "cached blocks": request.num_hit_blocks}
            self._begin(request, "prefill", now, args)
            self._prefilling[request.arrival] = request

    def preempted(self, request: Request, now: float) -> None:
        """It had to give its row up, for others."""
        if self.active:
            self._back_to_queue(request, now, recovering=False)

    def finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """It is over."""
        if self.active and request.arrival in self._open:
            args = {"reason": reason, "output tokens": request.num_output}
            while self._open[request.arrival]:
                self._end_innermost(request, now, args if len(self._open[request.arrival]) == 1 else {})
            del self._open[request.arrival]
            self._prefilling.pop(request.arrival, None)

    def _look_for_first_tokens(self, replica: Replica, now: float) -> None:
        """Of the requests in prefill, those that have a new token decode from now on."""
        for arrival, request in list(self._prefilling.items()):
            if request.replica != replica.index or request.row is None:
                continue
            if replica.rows.committed[request.row] > len(request.tokens):  # what it had when it was admitted
                self._end_until(request, ("prefill", "recovery"), now)
                self._begin(request, "decode", now)
                del self._prefilling[arrival]

    def _back_to_queue(self, request: Request, now: float, recovering: bool) -> None:
        slices = self._open.get(request.arrival)
        if slices is None:
            return
        self._prefilling.pop(request.arrival, None)
        waits = slices[-1].name == "queue"
        self._end_until(request, ("queue", "prefill", "decode"), now)
        if recovering and slices[-1].name != "recovery" and not waits:
            self._begin(request, "recovery", now)
        self._begin(request, "queue", now)

    def _begin(self, request: Request, name: str, at: float, args: t.Arguments | None = None) -> None:
        args = args or {}
        self._open.setdefault(request.arrival, []).append(_Slice(name, at, args))
        self._emit(t.begin(REQUESTS_PID, "request", name, str(request.arrival), at, args))

    def _end_innermost(self, request: Request, at: float, args: t.Arguments | None = None) -> None:
        name = self._open[request.arrival].pop().name
        self._emit(t.end(REQUESTS_PID, "request", name, str(request.arrival), at, args or {}))

    def _end_until(self, request: Request, names: tuple[str, ...], at: float) -> None:
        """End the open phases as long as they are among `names`; the request's own slice stays."""
        slices = self._open[request.arrival]
        while len(slices) > 1 and slices[-1].name in names:
            self._end_innermost(request, at)

    def _catch_up(self, request: Request, now: float) -> None:
        """A request that was there before anybody recorded: from its arrival, in the phase it is in now."""
        outer = _Slice(request.request_id, request.arrived_at, {"prompt tokens": request.prompt_len})
        phase = "queue" if request.state is RequestState.WAITING else "decode"
        began = now
        if request.state is RequestState.WAITING and request.admitted_at is None:
            began = request.arrived_at
        if request.state is RequestState.RUNNING and request.first_token_at is None:
            phase = "prefill"
            self._prefilling[request.arrival] = request
        self._open[request.arrival] = [outer, _Slice(phase, began, {})]
