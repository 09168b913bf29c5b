"""A whole deployment in virtual time: the real engine, simulated workers, clients and supervisor, and bad luck.

Everything that crosses a process boundary is encoded and decoded. One seed, one history; `play(seed)` raises when
anything in it was not as it must be.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack
from scheduler import events as e
from scheduler.batch import I64, RowBatch
from scheduler.engine import Engine
from tests.sim.client import SimulatedClient
from tests.sim.scenario import Fault, Scenario, draw
from tests.sim.verdict import judge
from tests.sim.worker import SimulatedWorker, run_held_row, swap_grown_ids
from worker.batch import DigestMismatch

STUCK_AFTER_S = 300.0
LONG_PROMPT = 12
"""Prompts are short here."""
SUPERVISOR = b"supervisor"

Trace = Callable[[str], None]


class Stuck(AssertionError):
    """Requests are left and nothing moves them."""


class Process:
    """A worker's process: what it has been sent, what it does now, whether it lives."""

    def __init__(self, worker: SimulatedWorker):
        self.worker = worker
        self.inbox: deque[m.SchedulerOutput] = deque()
        self.alive = True
        self.frozen = False
        self.busy = False
        self.rest_s = 0.0
        self.ended_at = 0.0
        """When its last step did."""
        self.refusing = False
        """It refused a plan: it waits for its end."""
        self.late_s = 0.0


class Cluster:
    """One history in progress."""

    def __init__(self, scenario: Scenario, trace: Trace | None = None):
        self.scenario = scenario
        self.trace = trace
        self.random = random.Random(scenario.seed + 1_000_003)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.pushed = 0
        self.link_free: dict[tuple[str, bytes], float] = {}
        """Per direction and peer: when its last message arrives; messages of a peer do not overtake each other."""
        self.engine = Engine(
            scenario.config, scenario.model, hash_key=b"secret", hold_policy=self._hold if scenario.hold_rate else None
        )
        self.engine.planner.long_prompt = LONG_PROMPT
        self.inbox: list[e.Event] = []
        self.batch_s = self.random.choice((0.0, 0.0, 0.005))
        self.processes: dict[bytes, Process] = {}
        self.current: list[Process | None] = [None] * scenario.config.workers
        self.incarnations = [0] * scenario.config.workers
        self.plans_seen = [0] * scenario.config.workers
        self.pending_faults = sorted(scenario.faults, key=lambda fault: fault.plan)
        self.restarts: dict[str, float] = {}
        self.unrecorded_divergence = False
        clients = {request.client for request in scenario.requests}
        self.clients = [
            SimulatedClient(number, self._from_client, scenario.leaves.get(number))
            for number in range(max(clients) + 1)
        ]
        self.done = False

    # ---------------------------------------------------------------------------------------------------- event loop

    def run(self) -> None:
        """Play the history to its end and judge it."""
        self._handle([e.FromSupervisor(SUPERVISOR, m.Watch())])
        for replica, delay in enumerate(self.scenario.first_hello_s):
            self.at(delay, self._start_worker, replica)
        for request in self.scenario.requests:
            self.at(request.submit_at, self.clients[request.client].submit, request)
        self.at(1.0, self._tick)
        while self.heap:
            self.now, _, call, arguments = heapq.heappop(self.heap)
            call(*arguments)
            if not self.done and self._settled():
                self.done = True
                self.say("all streams are settled")
            if self.now > STUCK_AFTER_S and not self.done:
                raise Stuck(f"at {self.now:.1f} s {sorted(self.engine.requests)} are unfinished")
        judge(self)

    def at(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self._at_time(self.now + delay, call, *arguments)

    def _at_time(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (time_s, self.pushed, call, arguments))

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:9.4f}  {text}")

    def _settled(self) -> bool:
        if self.engine.requests or self.inbox:
            return False
        return all(
            client.gone or all(stream.settled for stream in client.streams.values()) for client in self.clients
        ) and all(
            self.clients[request.client].gone or request.request_id in self.clients[request.client].streams
            for request in self.scenario.requests
        )

    def _arrival(self, direction: str, peer: bytes, extra: float = 0.0) -> float:
        """When the next message of a link arrives, never ahead of the one before."""
        arrival = self.now + extra + self.random.expovariate(1 / self.scenario.link_s)
        arrival = max(arrival, self.link_free.get((direction, peer), 0.0))
        self.link_free[direction, peer] = arrival
        return arrival

    def _hold(self, rows: RowBatch, active: I64) -> NDArray[np.bool_]:
        rate = self.scenario.hold_rate
        return np.array([self.random.random() < rate for _ in range(len(active))], dtype=np.bool_)

    # -------------------------------------------------------------------------------------------------------- engine

    def _tick(self) -> None:
        if not self.done:
            self.at(1.0, self._tick)
        self._handle([e.Tick()])

    def _arrive(self, event: e.Event) -> None:
        """An event reaches the scheduler; some histories let it see several at once."""
        if not self.batch_s:
            self._handle([event])
        else:
            if not self.inbox:
                self.at(self.batch_s, self._flush)
            self.inbox.append(event)

    def _flush(self) -> None:
        events, self.inbox = self.inbox, []
        self._handle(events)

    def _handle(self, events: list[e.Event]) -> None:
        while events:
            actions = self.engine.handle_all(events, self.now)
            if self.trace is not None:
                for event in events:
                    self.say(f"  > {event}")
                for action in actions:
                    self.say(f"  < {action}")
            events = []
            for action in actions:
                match action:
                    case e.ToWorker(identity, message):
                        events += self._to_worker(identity, message)
                    case e.ToClient(identity, message):
                        events += self._to_client(identity, message)
                    case e.ToSupervisor(_, message):
                        self._to_supervisor(_cross(codec.scheduler_to_supervisor, message))

    def _to_worker(self, identity: bytes, message: m.SchedulerToWorker) -> list[e.Event]:
        process = self.processes[identity]
        if not process.alive and self.random.random() < 0.5:  # the socket knows already
            return [e.WorkerUnreachable(identity, "no route")]
        self._at_time(
            self._arrival("to worker", identity),
            self._worker_receives,
            process,
            _cross(codec.scheduler_to_worker, message),
        )
        return []

    def _to_client(self, identity: bytes, message: m.SchedulerToClient) -> list[e.Event]:
        client = self.clients[int(identity.split(b"-")[1])]
        if identity not in client.open:
            return [e.ClientGone(identity)]
        message = _cross(codec.scheduler_to_client, message)
        self._at_time(self._arrival("to client", identity), self._client_receives, client, identity, message)
        return []

    # -------------------------------------------------------------------------------------------------------- clients

    def _from_client(self, identity: bytes, message: m.ClientToScheduler) -> None:
        event = e.FromClient(identity, _cross(codec.client_to_scheduler, message))
        self._at_time(self._arrival("from client", identity), self._arrive, event)

    def _client_receives(self, client: SimulatedClient, identity: bytes, message: m.SchedulerToClient) -> None:
        if identity in client.open:
            client.receive(identity, message)

    # -------------------------------------------------------------------------------------------------------- workers

    def _start_worker(self, replica: int) -> None:
        self.incarnations[replica] += 1
        scenario = self.scenario
        worker = SimulatedWorker(scenario, replica, self.incarnations[replica])
        process = Process(worker)
        self.processes[worker.identity] = self.current[replica] = process
        hello = m.Hello(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            replica=replica,
            rank=0,
            tp_size=1,
            pid=1000 + replica,
            model_fingerprint=scenario.model.fingerprint,
            block_size=scenario.config.block_size,
            groups=scenario.model.cache_groups,
            num_blocks=scenario.num_blocks[replica],
            max_model_len=scenario.config.max_model_len,
            max_num_seqs=scenario.config.max_num_seqs,
            kv_memory_id=worker.incarnation,
            device="cpu",
            dtype="float32",
            attention_backend="simulated",
            backend_reason="it is a simulation",
            lends_cores=True,
        )
        self._from_worker(process, hello)
        self.at(self.scenario.config.heartbeat_interval_s, self._beat, process)

    def _from_worker(self, process: Process, message: m.WorkerToScheduler, extra: float = 0.0) -> None:
        event = e.FromWorker(process.worker.identity, _cross(codec.worker_to_scheduler, message))
        self._at_time(self._arrival("from worker", process.worker.identity, extra), self._arrive, event)

    def _beat(self, process: Process) -> None:
        if process.alive and not self.done:
            self.at(self.scenario.config.heartbeat_interval_s, self._beat, process)
            if not process.frozen:
                self._from_worker(process, m.Heartbeat(process.worker.worker_id, process.worker.incarnation, "ready"))

    def _worker_receives(self, process: Process, message: m.SchedulerToWorker) -> None:
        if not process.alive:
            return
        match message:
            case m.Welcome(_, epoch, _):
                process.worker.batch.start_epoch(epoch)
            case m.Rest(us):
                process.rest_s = us / 1e6
                self._work(process)
            case m.SchedulerOutput():
                process.inbox.append(message)
                self._work(process)
            case _:
                raise AssertionError(f"{process.worker.worker_id} got {message}")

    def _work(self, process: Process) -> None:
        """Take the next plan, if the worker is free to."""
        if not process.inbox or process.busy or process.frozen or process.refusing or not process.alive:
            return
        if self.now < process.ended_at + process.rest_s:
            return self._at_time(process.ended_at + process.rest_s, self._work, process)
        plan, worker = process.inbox.popleft(), process.worker
        self.plans_seen[worker.replica] += 1
        fault = self._next_fault(worker.replica)
        misapplied = None
        if fault is not None and fault.style in ("run_held_row", "swap_grown_ids"):
            misapplied = run_held_row(plan) if fault.style == "run_held_row" else swap_grown_ids(plan)
            if misapplied is None:  # nothing in this plan to get wrong: another one will do
                self.pending_faults.append(fault)
                fault = None
        if fault is not None:
            self.say(f"!! {fault.style} at {worker.incarnation}, plan {plan.step}")
            if fault.style == "before_run":
                return self._die(process, fault)
            if fault.style == "freeze":
                process.frozen = True
                process.inbox.appendleft(plan)
                self.plans_seen[worker.replica] -= 1
                return self.at(fault.frozen_s, self._thaw, process)
        try:
            tokens = worker.run(plan, misapplied)
        except DigestMismatch as mismatch:
            assert misapplied is not None, f"the planes diverged by themselves in plan {plan.step}: {mismatch}"
            process.refusing = True
            refusal = m.PlanRefused(plan.epoch, plan.step, "digest", mismatch.expected, mismatch.actual)
            return self._from_worker(process, refusal)
        process.busy = True
        duration = self.random.expovariate(1 / self.scenario.step_s)
        timings = pack([0, 0, int(duration * 1e6), 0, 0])
        result = m.ModelRunnerOutput(plan.epoch, plan.step, pack(tokens), plan.digest, timings)
        if fault is not None and fault.style == "while_running":
            self.at(duration / 2, self._die, process, fault)
        self.at(duration, self._step_done, process, result, fault)
        return None

    def _step_done(self, process: Process, result: m.ModelRunnerOutput, fault: Fault | None) -> None:
        if not process.alive:
            return
        process.busy, process.ended_at = False, self.now
        dies = fault is not None and fault.style == "after_run"
        self._from_worker(process, result, fault.late_s if fault is not None and dies else 0.0)
        if fault is not None and dies:
            self._die(process, fault)
        else:
            self._work(process)

    def _thaw(self, process: Process) -> None:
        process.frozen = False
        self._work(process)

    def _next_fault(self, replica: int) -> Fault | None:
        for fault in self.pending_faults:
            if fault.replica == replica and fault.plan <= self.plans_seen[replica]:
                self.pending_faults.remove(fault)
                return fault
        return None

    def _die(self, process: Process, fault: Fault) -> None:
        """The process is gone by itself; the supervisor starts another, and may or may not say so before that."""
        worker = process.worker
        if not process.alive:
            return
        process.alive = False
        self.say(f"!! {worker.incarnation} dies ({'notice' if fault.notice else 'no notice'})")
        if fault.notice:
            self._exited(worker, self.random.choice((0.0, 0.005, 0.1)))
        self.at(fault.restart_s, self._start_worker, worker.replica)

    def _exited(self, worker: SimulatedWorker, delay: float) -> None:
        exited = m.WorkerExited(worker.worker_id, worker.incarnation, "exit status -9")
        event = e.FromSupervisor(SUPERVISOR, _cross(codec.supervisor_to_scheduler, exited))
        self.at(delay, self._arrive, event)

    # ----------------------------------------------------------------------------------------------------- supervisor

    def _to_supervisor(self, message: m.SchedulerToSupervisor) -> None:
        """Kill what the scheduler has fenced, after a while in which the zombie may go on, and start another."""
        if isinstance(message, m.KillWorker):
            replica = int(message.worker_id.removeprefix("worker-"))
            process = self.current[replica]
            if process is not None and process.worker.incarnation == message.incarnation:
                self.at(self.random.choice((0.001, 0.05, 1.0)), self._kill, process)

    def _kill(self, process: Process) -> None:
        worker = process.worker
        if process.alive:
            process.alive = False
            self.say(f"!! {worker.incarnation} is killed")
            self._exited(worker, 0.01)
            self.at(self.random.choice((0.0, 0.2)), self._start_worker, worker.replica)


def _cross(decoder: codec.Decoder[Any], message: msgspec.Struct) -> Any:
    """The message as it arrives at the other side."""
    return decoder.decode(codec.encode(message))


def play(seed: int, trace: Trace | None = None) -> Cluster:
    """Run the history of `seed`. Raises whatever was wrong, with the seed in a note."""
    cluster = Cluster(draw(seed), trace)
    try:
        cluster.run()
    except Exception as error:
        error.add_note(f"history {seed} at {cluster.now:.4f} s; replay with: python -m tests.sim {seed}")
        raise
    return cluster
