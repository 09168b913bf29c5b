"""How each process of a deployment is started: its command and environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.prepare import child_environment


@dataclass(frozen=True)
class Commands:
    """Commands of one deployment. config: the file that every process reads; runtime: the folder of the sockets."""

    config: Path
    runtime: Path
    threads_per_worker: int
    python: tuple[str, ...] = (sys.executable,)
    scheduler_module: tuple[str, ...] = field(default=("-m", "scheduler"))
    worker_module: tuple[str, ...] = field(default=("-m", "worker"))
    gateway_module: tuple[str, ...] = field(default=("-m", "gateway"))

    def scheduler(self) -> tuple[list[str], dict[str, str]]:
        """(command, environment) of the scheduler."""
        return [*self.python, *self.scheduler_module, *self._common()], child_environment(1)

    def worker(self, worker_id: str, replica: int, incarnation: str) -> tuple[list[str], dict[str, str]]:
        """(command, environment) of one start of a worker."""
        identity = ["--worker-id", worker_id, "--replica", str(replica), "--incarnation", incarnation]
        command = [*self.python, *self.worker_module, *self._common(), *identity]
        return command, child_environment(self.threads_per_worker)

    def gateway(self, listener_fd: int, beat_fd: int) -> tuple[list[str], dict[str, str]]:
        """(command, environment) of the gateway, which inherits a listening socket and a pipe for its beats."""
        inherited = ["--listener-fd", str(listener_fd), "--beat-fd", str(beat_fd)]
        return [*self.python, *self.gateway_module, *self._common(), *inherited], child_environment(1)

    def _common(self) -> list[str]:
        return ["--config", str(self.config), "--runtime", str(self.runtime)]
