"""The supervisor's line to one incarnation of the scheduler. A scheduler that is gone swallows what is sent to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

import zmq

from protocol import codec
from protocol import messages as m
from protocol.runtime import Endpoints
from protocol.sockets import connect_dealer, fresh_identity

log = logging.getLogger("supervisor")


class ControlLine:
    """A DEALER on the control endpoint that has asked to be told of every change."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints):
        self.endpoints = endpoints
        self.socket = connect_dealer(context, endpoints.control, fresh_identity("supervisor"))
        self.send(m.Watch())

    def send(self, message: m.SupervisorToScheduler) -> None:
        """Queue a message; never waits."""
        with suppress(zmq.Again):
            self.socket.send(codec.encode(message), zmq.DONTWAIT)

    def receive(self) -> Iterator[m.SchedulerToSupervisor]:
        """Every message that is there by now."""
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                message: m.SchedulerToSupervisor = codec.scheduler_to_supervisor.decode(frame)
            except codec.ProtocolError as error:
                log.error("bad message from the scheduler: %s", error)
                continue
            yield message

    def close(self) -> None:
        self.socket.close(linger=0)
