"""A worker's place in the deployment, kept while processes come and go in it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from protocol.exit_codes import CANNOT_SERVE
from protocol.messages import WorkerStatus
from supervisor.backoff import Backoff
from supervisor.child import Child, describe_exit
from supervisor.processes import Commands
from supervisor.terminal import Terminal

MAX_FAILED_STARTS = 3
"""Deaths in a row before READY after which the others no longer wait for this worker."""


@dataclass
class WorkerSlot:
    """States: running (child, status None), ready (child and status), waiting for its restart (restart_at)."""

    worker_id: str
    replica: int
    child: Child | None = None
    status: WorkerStatus | None = None
    """As the scheduler last told it, of the child that runs now; None until that is ready."""
    ready_at: float | None = None
    restart_at: float | None = None
    overdue: bool = False
    """Killed because it was not ready in time."""
    problem: str = ""
    """Why the last process in this slot ended."""
    hopeless: bool = False
    """The last process said that the next one would fare no better."""
    refusal: str = ""
    """What the scheduler said against the process that runs now."""
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def given_up(self) -> bool:
        """Nobody waits for it any more (it is still restarted, ever more slowly)."""
        return self.hopeless or self.backoff.failed_starts >= MAX_FAILED_STARTS

    def start(self, commands: Commands, terminal: Terminal) -> Child:
        """Start a process under a fresh incarnation."""
        incarnation = secrets.token_hex(8)
        command, environment = commands.worker(self.worker_id, self.replica, incarnation)
        self.child = Child(self.worker_id, command, environment, terminal, incarnation)
        self.restart_at = None
        self.overdue = False
        self.refusal = ""
        return self.child

    def ready(self, status: WorkerStatus) -> None:
        """The scheduler says that the process serves."""
        if self.status is None:
            self.ready_at = time.monotonic()
        self.hopeless = False
        self.status = status

    def ended(self, how: str) -> None:
        """The process is gone: how it ended becomes the problem, and the restart is planned."""
        now = time.monotonic()
        assert self.child is not None
        self.hopeless = how == describe_exit(CANNOT_SERVE)
        if self.refusal:
            self.problem = f"{how}: {self.refusal}"
        else:
            self.problem = self.child.last_words(how, was_ready=self.status is not None)
        ready_for = None if self.ready_at is None else now - self.ready_at
        self.child = self.status = self.ready_at = None
        self.restart_at = now + self.backoff.after_death(ready_for)
