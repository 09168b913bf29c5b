"""The scheduler process around the engine: frames in, events; actions, frames out. Decides nothing."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from protocol import codec
from protocol import messages as m
from protocol.config import EngineConfig
from protocol.model_config import ModelConfig
from protocol.runtime import Endpoints, publish
from protocol.sockets import bind_router
from scheduler import events as e
from scheduler.collector import leave_out_what_is_there
from scheduler.engine import Engine
from scheduler.outbox import Outbox
from scheduler.trace_file import TraceFile

MOST_FRAMES_PER_TURN = 512
"""Frames taken from one socket before the others get their turn."""
RETRY_MS = 20
"""How soon a client that would not take a message is tried again."""
GOODBYE_MS = 300
"""How long the last messages may take to leave at shutdown."""

_LOG = logging.getLogger("scheduler")


class Server:
    """Binds the three planes and runs the loop. Raises BindError when an endpoint is taken."""

    def __init__(self, config: EngineConfig, runtime: Path):
        self.config = config
        self.runtime = runtime
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients, client = bind_router(self.context, self._address("client", config.client_port))
        self.workers, worker = bind_router(self.context, self._address("worker"))
        self.control, control = bind_router(self.context, f"ipc://{runtime}/control.sock")
        self.endpoints = Endpoints(client=client, worker=worker, control=control, pid=os.getpid())
        self.engine = Engine(
            config,
            ModelConfig.from_folder(config.model),
            hash_key=secrets.token_bytes(32),
            now=time.monotonic(),
            clock=time.monotonic,
            pid=os.getpid(),
        )
        self.trace = TraceFile(Path(config.trace)) if config.trace else None
        if self.trace:
            self.engine.trace_to_file(time.monotonic())
        self.outbox = Outbox()
        self.dropped_frames = 0
        self.running = True
        self._planes: tuple[tuple[zmq.Socket[bytes], codec.Decoder[Any], type[Any]], ...] = (
            (self.workers, codec.worker_to_scheduler, e.FromWorker),
            (self.control, codec.supervisor_to_scheduler, e.FromSupervisor),
            (self.clients, codec.client_to_scheduler, e.FromClient),
        )

    def _address(self, plane: str, port: int = 0) -> str:
        return f"ipc://{self.runtime}/{plane}.sock" if self.config.transport == "ipc" else f"tcp://127.0.0.1:{port}"

    def run(self) -> None:
        """Serve until told to shut down."""
        publish(self.runtime, self.endpoints)
        _LOG.info("listening: clients %s, workers %s", self.endpoints.client, self.endpoints.worker)
        poller = zmq.Poller()
        for socket, _, _ in self._planes:
            poller.register(socket, zmq.POLLIN)
        tick_s = self.config.heartbeat_interval_s
        next_tick = time.monotonic() + tick_s
        try:
            while self.running:
                wait_ms = max(0, round((next_tick - time.monotonic()) * 1000))
                poller.poll(min(wait_ms, RETRY_MS) if self.outbox else wait_ms)
                events: list[e.Event] = []
                for socket, decoder, event in self._planes:
                    self._receive(socket, decoder, event, events)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + tick_s
                    events.append(e.Tick(self.dropped_frames))
                self._flush_outbox(events)
                while events:
                    events = self._perform(self.engine.handle_all(events, time.monotonic()))
        finally:
            self._perform(self.engine.end_traces(time.monotonic()))
            self.close()

    def close(self) -> None:
        """Close all sockets; what was said last may still leave."""
        for socket, _, _ in self._planes:
            socket.close(linger=GOODBYE_MS)
        self.context.term()

    # ------------------------------------------------------------------------------------------------------ receive

    def _receive(
        self, socket: zmq.Socket[bytes], decoder: codec.Decoder[Any], event: type[Any], events: list[e.Event]
    ) -> None:
        for _ in range(MOST_FRAMES_PER_TURN):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise codec.MalformedFrame(f"{len(parts) - 1} frames instead of 1")
                events.append(event(parts[0], decoder.decode(parts[1])))
            except codec.ProtocolError as error:
                self.dropped_frames += 1
                _LOG.warning("dropped a frame from %r: %s", parts[0][:40], error)

    # ------------------------------------------------------------------------------------------------------ perform

    def _perform(self, actions: list[e.Action]) -> list[e.Event]:
        """Carry out actions in order; returns what failed, as events."""
        failures: list[e.Event] = []
        for action in actions:
            match action:
                case e.ToWorker(identity, message):
                    self._to_worker(identity, message, failures)
                case e.ToClient(identity, message):
                    self._to_client(identity, message, failures)
                case e.ToSupervisor(identity, message):
                    self._try_send(self.control, identity, message)
                case e.Log(level, text):
                    _LOG.log(level, text)
                case e.WriteFlightRecord():
                    self._write_flight_record(action)
                case e.WriteTrace(events, last):
                    self._write_trace(events, last)
                case e.Exit():
                    self.running = False
        return failures

    def _to_worker(self, identity: bytes, message: m.SchedulerToWorker, failures: list[e.Event]) -> None:
        began = time.monotonic()
        frame = codec.encode(message)
        if isinstance(message, m.SchedulerOutput):
            self.engine.plan_encoded(identity, message, len(frame), time.monotonic() - began)
        problem = self._try_send_frame(self.workers, identity, frame)
        if problem is not None:
            failures.append(e.WorkerUnreachable(identity, f"cannot be reached: {problem.strerror}"))
        if isinstance(message, m.Welcome):
            leave_out_what_is_there()

    def _to_client(self, identity: bytes, message: m.SchedulerToClient, failures: list[e.Event]) -> None:
        if self.outbox.holds(identity):
            self.outbox.add(identity, message)
            return
        problem = self._try_send(self.clients, identity, message)
        if isinstance(problem, zmq.Again):
            self.outbox.add(identity, message)
        elif problem is not None:
            failures.append(e.ClientGone(identity))

    def _flush_outbox(self, events: list[e.Event]) -> None:
        """Send on what slow clients can take by now."""
        for identity in self.outbox.identities():
            while (message := self.outbox.first(identity)) is not None:
                problem = self._try_send(self.clients, identity, message)
                if problem is None:
                    self.outbox.pop(identity)
                    continue
                if not isinstance(problem, zmq.Again):
                    self.outbox.drop(identity)
                    events.append(e.ClientGone(identity))
                break

    def _try_send(self, socket: zmq.Socket[bytes], identity: bytes, message: msgspec.Struct) -> zmq.ZMQError | None:
        return self._try_send_frame(socket, identity, codec.encode(message))

    def _try_send_frame(self, socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> zmq.ZMQError | None:
        """Send without waiting. Returns the error: Again when the peer's queue is full, else it is gone."""
        try:
            socket.send_multipart((identity, frame), zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            return error
        return None

    def _write_trace(self, events: bytes, last: bool) -> None:
        if self.trace is None:
            return
        try:
            self.trace.write(events, last)
        except OSError as error:
            self.trace = None
            _LOG.error("the trace ends here: %s cannot be written: %s", self.config.trace, error.strerror)

    def _write_flight_record(self, record: e.WriteFlightRecord) -> None:
        path = self.runtime / f"flight-replica{record.replica}-epoch{record.epoch}.json"
        path.write_bytes(msgspec.json.encode({"reason": record.reason, "plans": record.plans}))
        _LOG.error("replica %d diverged (%s); its last plans: %s", record.replica, record.reason, path)


def serve(config: EngineConfig, runtime: Path) -> None:
    """Run a scheduler until SIGTERM, SIGINT or a Shutdown message."""
    server = Server(config, runtime)

    def stop(signum: int, frame: object) -> None:
        server.running = False

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server.run()
