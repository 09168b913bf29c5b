"""A deployment of scripted processes under a real supervisor, and how to wait for what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parent / "scripted" / "launch.py"
ROOT = Path(__file__).parents[2]


class Deployment:
    """Use with `with`: whatever the test did, no process survives it."""

    def __init__(self, folder: Path, workers: int = 2, start_timeout_s: float = 30.0, **scripts: str):
        self.runtime = folder
        self.ready_file = folder / "ready.json"
        self._command = [sys.executable, str(SCRIPT), str(folder), str(self.ready_file)]
        self._command += [str(workers), str(start_timeout_s)]
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self._environment |= {f"SCRIPT_{name.upper()}": behaviour for name, behaviour in scripts.items()}

    def __enter__(self) -> Deployment:
        self.log = self.runtime / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        self.family: set[psutil.Process] = set()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.family:
            if process.is_running():
                process.kill()

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """The first true value of `condition`. Fails with the log when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)
        return value

    def wait_ready(self) -> dict[str, int]:
        """The pids, once requests can be served."""
        self.wait_until(self.ready_file.exists)
        self.remember_family()
        return self.pids

    def remember_family(self) -> None:
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    @property
    def pids(self) -> dict[str, int]:
        return dict(json.loads(self.ready_file.read_text())["pids"])

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def exits(self) -> list[str]:
        """What the scheduler was told of dead workers: "id incarnation reason"."""
        path = self.runtime / "exits"
        return path.read_text().splitlines() if path.exists() else []

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Signal the supervisor; seconds until it has ended."""
        self.remember_family()
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(15)
        return time.monotonic() - began

    def survivors(self) -> list[psutil.Process]:
        """Members of the family that still run (a zombie does not)."""
        _, alive = psutil.wait_procs(list(self.family), timeout=5)
        return alive
