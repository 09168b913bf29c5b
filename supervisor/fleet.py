"""The supervisor's loop: one poll over the scheduler's messages, the death of every child, and the stop signals.

A worker's death is told to the scheduler at once, and the worker restarted; how soon is `Backoff`'s matter. When the
scheduler dies, everything is started anew: what the workers hold means nothing without its tables. Requests in flight
are lost then.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import psutil
import zmq

from protocol import messages as m
from protocol.config import EngineConfig
from protocol.runtime import RuntimeFolderError, read_endpoints
from supervisor.backoff import Backoff
from supervisor.child import Child
from supervisor.control import ControlLine
from supervisor.front_door import FrontDoor
from supervisor.prepare import StartFailed
from supervisor.processes import Commands
from supervisor.report import print_table, write_ready_file
from supervisor.stop_signal import StopSignal
from supervisor.terminal import Terminal
from supervisor.worker_slot import MAX_FAILED_STARTS, WorkerSlot

log = logging.getLogger("supervisor")

_PUBLISH_POLL_S = 0.02
"""How often we look for the scheduler's endpoints while it starts; nothing is polled by time after that."""
_SCHEDULER_START_S = 30.0
_TERM_AFTER_S, _KILL_AFTER_S, _GIVE_UP_AFTER_S = 1.0, 2.5, 4.0


class Fleet:
    """The processes of one deployment. `run` returns when all of them have ended."""

    def __init__(
        self,
        config: EngineConfig,
        commands: Commands,
        stop: StopSignal,
        terminal: Terminal,
        *,
        ready_file: Path | None,
        began: float,
        front_door: FrontDoor | None = None,
    ):
        self._config = config
        self._commands = commands
        self._stop = stop
        self._ready_file = ready_file
        self._began = began
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(stop.fd, zmq.POLLIN)
        self._terminal = terminal
        self._scheduler: Child | None = None
        self._scheduler_backoff = Backoff()
        self._scheduler_restart_at: float | None = None
        self._control: ControlLine | None = None
        self._front_door = front_door
        self._slots = [WorkerSlot(f"worker-{i}", i) for i in range(config.workers)]
        self._started = False
        self._start_deadline = time.monotonic() + config.start_timeout_s

    def run(self) -> None:
        """Serve until a stop signal. Raises StartFailed when that never begins; leaves no process behind either way."""
        try:
            self._start_scheduler()
            while True:
                ready = dict(self._poller.poll(self._timeout_ms()))
                if self._stop.fd in ready and (signal := self._stop.take()):
                    log.info("%s: stopping", signal.name)
                    return
                self._see_deaths(ready)
                self._hear_scheduler()
                self._do_what_is_due()
                if not self._started:
                    self._check_started()
        finally:
            self._end_all()

    # ----------------------------------------------------------------------------------------------- scheduler

    def _start_scheduler(self) -> None:
        (self._commands.runtime / "endpoints.json").unlink(missing_ok=True)
        self._scheduler_restart_at = None
        self._scheduler = Child("scheduler", *self._commands.scheduler(), self._terminal)
        self._poller.register(self._scheduler.pidfd, zmq.POLLIN)
        log.info("scheduler started, pid %d", self._scheduler.pid)

    def _connect_if_published(self) -> None:
        assert self._scheduler is not None
        try:
            endpoints = read_endpoints(self._commands.runtime)
        except RuntimeFolderError:
            if time.monotonic() > self._scheduler.started_at + _SCHEDULER_START_S:
                log.error("scheduler has not opened its sockets within %g s; killed", _SCHEDULER_START_S)
                self._scheduler.send_signal(SIGKILL)
            return
        self._control = ControlLine(self._context, endpoints)
        self._poller.register(self._control.socket, zmq.POLLIN)
        for slot in self._slots:
            self._start_worker(slot)
        if self._front_door and not self._front_door.child:
            self._start_gateway(self._front_door)
        self._write_ready_file()

    def _scheduler_died(self, scheduler: Child) -> None:
        self._poller.unregister(scheduler.pidfd)
        ready_for = time.monotonic() - scheduler.started_at if self._control else None
        problem = f"scheduler ended: {scheduler.last_words(scheduler.reap(), was_ready=ready_for is not None)}"
        self._scheduler = None
        if not self._started:
            raise StartFailed(problem)
        delay = self._scheduler_backoff.after_death(ready_for)
        if self._scheduler_backoff.failed_starts >= MAX_FAILED_STARTS:
            raise StartFailed(f"{problem} (for the {MAX_FAILED_STARTS}rd time in a row)")
        log.error("%s; requests in flight are lost; all processes start anew in %.1f s", problem, delay)
        if self._control:
            self._poller.unregister(self._control.socket)
            self._control.close()
            self._control = None
        for slot in self._slots:
            slot.restart_at = None
            if slot.child:
                slot.child.send_signal(SIGKILL)
                self._collect(slot, slot.child)
                slot.restart_at = None  # the new scheduler's start brings it back
        self._scheduler_restart_at = time.monotonic() + delay

    def _hear_scheduler(self) -> None:
        if self._control is None:
            return
        for message in self._control.receive():
            match message:
                case m.WorkerChanged():
                    self._worker_changed(message)
                case m.KillWorker():
                    for slot in self._slots:
                        if slot.child and slot.child.incarnation == message.incarnation:
                            log.warning("%s is killed for the scheduler: %s", slot.worker_id, message.reason)
                            slot.refusal = message.reason
                            slot.child.send_signal(SIGKILL)
                case m.Status():
                    pass

    # ------------------------------------------------------------------------------------------------- workers

    def _start_worker(self, slot: WorkerSlot) -> None:
        child = slot.start(self._commands, self._terminal)
        self._poller.register(child.pidfd, zmq.POLLIN)
        log.info("%s started, pid %d", slot.worker_id, child.pid)

    def _worker_changed(self, message: m.WorkerChanged) -> None:
        status = message.status
        for slot in self._slots:
            if slot.child is None or slot.worker_id != status.worker_id or slot.child.pid != status.pid:
                continue  # not ours, or news of a process that is gone
            if status.state == "ready":
                if slot.status is None and self._started:
                    log.info("%s is back in service", slot.worker_id)
                slot.ready(status)
            elif message.detail:
                slot.refusal = message.detail
                log.warning("%s is %s: %s", slot.worker_id, status.state, message.detail)

    def _worker_died(self, slot: WorkerSlot, child: Child) -> None:
        self._collect(slot, child)
        if self._control:
            self._control.send(m.WorkerExited(slot.worker_id, child.incarnation, slot.problem))
        assert slot.restart_at is not None
        delay = max(0.0, slot.restart_at - time.monotonic())
        after = f"in {delay:.1f} s" if delay else "now"
        log.warning("%s (pid %d) ended: %s; restarted %s", slot.worker_id, child.pid, slot.problem, after)

    def _collect(self, slot: WorkerSlot, child: Child) -> None:
        self._poller.unregister(child.pidfd)
        how = child.reap()
        if slot.overdue:
            how = f"not ready within {self._config.start_timeout_s:g} s"
        slot.ended(how)

    # ------------------------------------------------------------------------------------------------- gateway

    def _start_gateway(self, door: FrontDoor) -> None:
        child = door.start(self._commands, self._terminal)
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._poller.register(door.beats, zmq.POLLIN)
        log.info("gateway started, pid %d, at %s", child.pid, door.url)

    def _hear_gateway(self, door: FrontDoor) -> None:
        if not door.hear():
            self._deaf_to_gateway(door)

    def _deaf_to_gateway(self, door: FrontDoor) -> None:
        if door.beats is not None:
            self._poller.unregister(door.beats)
            door.close_beats()

    def _gateway_died(self, door: FrontDoor, child: Child) -> None:
        self._poller.unregister(child.pidfd)
        self._deaf_to_gateway(door)
        delay = door.ended(child.reap())
        after = f"in {delay:.1f} s" if delay else "now"
        log.warning("gateway (pid %d) ended: %s; restarted %s", child.pid, door.problem, after)

    # -------------------------------------------------------------------------------------------------- deaths

    def _see_deaths(self, ready: dict[object, int]) -> None:
        door = self._front_door
        if door and door.beats in ready:
            self._hear_gateway(door)
        if door and door.child and door.child.pidfd in ready:
            self._gateway_died(door, door.child)
        for slot in self._slots:
            if slot.child and slot.child.pidfd in ready:
                self._worker_died(slot, slot.child)
        if self._scheduler and self._scheduler.pidfd in ready:
            self._scheduler_died(self._scheduler)

    # ---------------------------------------------------------------------------------------------------- time

    def _deadlines(self) -> list[float]:
        """When something must be done although nothing has happened."""
        due = [self._scheduler_restart_at, None if self._started else self._start_deadline]
        if self._front_door:
            due += [self._front_door.restart_at, self._front_door.silent_at(self._config)]
        if self._scheduler and not self._control:
            due.append(time.monotonic() + _PUBLISH_POLL_S)
        for slot in self._slots:
            due += [slot.restart_at, self._ready_deadline(slot)]
        return [moment for moment in due if moment is not None]

    def _ready_deadline(self, slot: WorkerSlot) -> float | None:
        """When a process that is still starting has used up its time."""
        if slot.child is None or slot.status or slot.overdue:
            return None
        return slot.child.started_at + self._config.start_timeout_s

    def _timeout_ms(self) -> int | None:
        """None: only an event can wake us."""
        deadlines = self._deadlines()
        return int(max(0.0, min(deadlines) - time.monotonic()) * 1000) + 1 if deadlines else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._scheduler_restart_at is not None and now >= self._scheduler_restart_at:
            self._start_scheduler()
        if self._scheduler and not self._control:
            self._connect_if_published()
        door = self._front_door
        if door and door.restart_at is not None and now >= door.restart_at:
            self._start_gateway(door)
            self._write_ready_file()
        if door and (silent_at := door.silent_at(self._config)) is not None and now >= silent_at:
            door.kill_hanging()
        for slot in self._slots:
            if slot.restart_at is not None and now >= slot.restart_at:
                self._start_worker(slot)
                self._write_ready_file()
            elif slot.child and (deadline := self._ready_deadline(slot)) and now >= deadline:
                slot.overdue = True
                slot.child.send_signal(SIGKILL)

    def _check_started(self) -> None:
        """The start is over once every worker is ready or given up; one that is ready is enough to serve."""
        some_ready = any(slot.status for slot in self._slots)
        late = time.monotonic() >= self._start_deadline
        if not late and not all(slot.status or slot.given_up for slot in self._slots):
            return
        if not some_ready:
            problems = {slot.worker_id: slot.problem for slot in self._slots}
            if late:
                limit = f"not ready within {self._config.start_timeout_s:g} s"
                problems = {name: problem or limit for name, problem in problems.items()}
            raise StartFailed("no worker can start: " + "; ".join(f"{name}: {why}" for name, why in problems.items()))
        self._started = True
        self._terminal.close_bars()
        assert self._control and self._scheduler
        rows = [(slot.worker_id, slot.status, slot.problem or "still starting") for slot in self._slots]
        seconds = time.monotonic() - self._began
        door = self._front_door
        gateway = (door.url, door.child.pid if door.child else None) if door else None
        print_table(self._config, self._control.endpoints, self._scheduler.pid, rows, seconds, gateway=gateway)
        self._write_ready_file()

    def _write_ready_file(self) -> None:
        """Anew whenever a process was replaced. One that is dead keeps its place until its successor has started."""
        if not (self._ready_file and self._started and self._control and self._scheduler):
            return
        pids = {"scheduler": self._scheduler.pid}
        pids |= {slot.worker_id: slot.child.pid for slot in self._slots if slot.child}
        door = self._front_door
        if door and door.child:
            pids["gateway"] = door.child.pid
        write_ready_file(self._ready_file, self._control.endpoints, pids, door.url if door else None)

    # -------------------------------------------------------------------------------------------------- ending

    def _end_all(self) -> None:
        """Ask, then insist: everything has ended within five seconds. A second stop signal skips the asking."""
        self._terminal.close_bars()
        if self._ready_file:
            self._ready_file.unlink(missing_ok=True)
        began = time.monotonic()
        if self._control:
            self._poller.unregister(self._control.socket)  # what it still says is of no interest
            self._control.send(m.Shutdown())
        gateway = self._front_door.child if self._front_door else None
        left = {child for child in (self._scheduler, gateway, *(slot.child for slot in self._slots)) if child}
        if not self._control:
            _signal(left, SIGTERM)
        terminated = killed = False
        while left:
            passed = time.monotonic() - began
            if passed >= _GIVE_UP_AFTER_S:
                log.error("did not end: %s", ", ".join(f"{child.name} (pid {child.pid})" for child in left))
                break
            if passed >= _KILL_AFTER_S and not killed:
                killed = True
                log.warning("killed, as it did not end when asked: %s", ", ".join(child.name for child in left))
                _signal(left, SIGKILL)
            elif passed >= _TERM_AFTER_S and not terminated:
                terminated = True
                _signal(left, SIGTERM)
            steps = (_TERM_AFTER_S, _KILL_AFTER_S, _GIVE_UP_AFTER_S)
            wait_s = min(step - passed for step in steps if step > passed)
            ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
            if self._stop.fd in ready and self._stop.take():
                _signal(left, SIGKILL)
            for child in [child for child in left if child.pidfd in ready]:
                self._poller.unregister(child.pidfd)
                child.reap()
                left.discard(child)
                if child is self._scheduler:  # it has told the workers that it knows; the others are told now
                    _signal(left, SIGTERM)
        if self._control:
            self._control.close()
        self._context.term()
        _sweep()


def _signal(children: set[Child], number: Signals) -> None:
    for child in children:
        child.send_signal(number)


def _sweep() -> None:
    """End whatever descends from us and is still there."""
    rest = psutil.Process().children(recursive=True)
    for process in rest:
        log.warning("left behind: pid %d; killed", process.pid)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(rest, timeout=0.5)
