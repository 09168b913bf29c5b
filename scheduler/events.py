"""What goes into the engine and what comes out: the whole surface between the core and its socket loop."""

from __future__ import annotations

from typing import NamedTuple

from protocol import messages as m


class FromWorker(NamedTuple):
    """A decoded message from the worker plane; `identity` is the sender's routing id."""

    identity: bytes
    message: m.WorkerToScheduler


class FromClient(NamedTuple):
    """A decoded message from the client plane."""

    identity: bytes
    message: m.ClientToScheduler


class FromSupervisor(NamedTuple):
    """A decoded message from the control plane."""

    identity: bytes
    message: m.SupervisorToScheduler


class WorkerUnreachable(NamedTuple):
    """A frame could not be sent to this worker: it is as good as dead."""

    identity: bytes
    reason: str


class ClientGone(NamedTuple):
    """A frame could not be sent to this client: it left."""

    identity: bytes


class Tick(NamedTuple):
    """Time has passed: look for workers that have fallen silent."""

    dropped_frames: int = 0


Event = FromWorker | FromClient | FromSupervisor | WorkerUnreachable | ClientGone | Tick


class ToWorker(NamedTuple):
    identity: bytes
    message: m.SchedulerToWorker


class ToClient(NamedTuple):
    identity: bytes
    message: m.SchedulerToClient


class ToSupervisor(NamedTuple):
    identity: bytes
    message: m.SchedulerToSupervisor


class Log(NamedTuple):
    """A line for the log; level as in `logging`."""

    level: int
    text: str


class WriteFlightRecord(NamedTuple):
    """The planes of a replica diverged: keep its last plans for whoever looks into it."""

    replica: int
    epoch: int
    reason: str
    plans: list[m.SchedulerOutput]


class WriteTrace(NamedTuple):
    """More of the deployment's trace file."""

    events: bytes
    last: bool


class Exit(NamedTuple):
    """Everything is said; the process ends."""


Action = ToWorker | ToClient | ToSupervisor | Log | WriteFlightRecord | WriteTrace | Exit
