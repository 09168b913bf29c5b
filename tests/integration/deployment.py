"""A whole deployment under test: `launch.py` and all that it starts, as processes, over their real sockets.

Knows how to start one apart from all others on this machine, to look into it, to kill parts of it and to prove that
nothing of it is left. Knows nothing about what is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from client import Client
from protocol.messages import ReplicaStatus, Status

ROOT = Path(__file__).parents[2]
START_S = 120.0
"""A deployment that is not ready by then has failed (a busy machine takes 10 s)."""
STOP_S = 5.0
"""What a stop may take, as promised to users."""

_POLL_S = 0.01
_Value = TypeVar("_Value")


class Deployment:
    """Use with `with`: ready inside it, and afterwards no process of it is left, or the test fails.

    folder: empty and private to this deployment; flags: of launch.py; settings: go into its --config file.
    It has a gateway only if the flags name a port (0: any), so that several deployments get along.
    """

    def __init__(self, folder: Path, *flags: str, settings: dict[str, object] | None = None):
        self.folder = folder
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        self.environment = {**os.environ, "PAGEPLANE_RUNTIME": str(folder / "run"), "COLUMNS": "200"}
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.command = [sys.executable, str(ROOT / "launch.py"), "--ready-file", str(self.ready_file), *flags]
        if "--port" not in flags:
            self.command.append("--no-gateway")
        if settings:
            lines = (f"{name} = {json.dumps(value)}" for name, value in settings.items())
            (folder / "settings.toml").write_text("\n".join(lines) + "\n")
            self.command += ["--config", str(folder / "settings.toml")]
        self._client: Client | None = None
        self.process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------------------------------------ start, stop

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.destroy()

    def start(self) -> None:
        """Start it and wait until requests can be served. Fails with the log if it ends or takes too long."""
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self.folder
            )
        self.wait_until(self.ready_file.exists, START_S, "ready")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Stop it by a signal to launch.py; seconds until that ended. Fails if it is slow or leaves a process."""
        self.close_client()
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_S + 5)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"launch.py does not stop:\n{self.text}") from None
        seconds = time.monotonic() - began
        assert code == 0, f"exit code {code}:\n{self.text}"
        assert seconds < STOP_S, f"took {seconds:.1f} s to stop:\n{self.text}"
        left = self.survivors()
        assert not left, f"left behind: {left}"
        return seconds

    def survivors(self, timeout_s: float = 2.0) -> list[psutil.Process]:
        """The processes of this deployment that have not ended after `timeout_s`, whoever their parent is by now."""
        _, alive = psutil.wait_procs(self._family(), timeout=timeout_s)
        return alive

    def _family(self) -> list[psutil.Process]:
        """Every running process that has our runtime folder in its environment."""
        own = self.environment["PAGEPLANE_RUNTIME"]
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PAGEPLANE_RUNTIME") == own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # ended, or another user's
        return found

    def destroy(self) -> None:
        """End whatever is left of it, by force and without a word."""
        self.close_client()
        for process in self._family():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.process is not None:
            self.process.wait()

    # ------------------------------------------------------------------------------------------------------- look

    @property
    def text(self) -> str:
        """What launch.py and its children wrote so far."""
        return self.log.read_text(errors="replace")

    @property
    def endpoints(self) -> dict[str, str]:
        """client, worker, control and, with a gateway, http → address."""
        return dict(json.loads(self.ready_file.read_text())["endpoints"])

    @property
    def pids(self) -> dict[str, int]:
        """scheduler, worker-0, … → process id, as the ready file tells them now."""
        return dict(json.loads(self.ready_file.read_text())["pids"])

    @property
    def client(self) -> Client:
        """A connected client, closed with the deployment."""
        if self._client is None:
            self._client = Client(self.endpoints["client"])
        return self._client

    def status(self) -> Status:
        """One snapshot of the scheduler."""
        return self.client.status()

    def preemptions(self) -> int:
        """Of all replicas, since the start."""
        return sum(replica.preemptions for replica in self.status().replicas)

    def recoveries(self) -> int:
        """Requests that outlived their worker, since the start."""
        return sum(replica.recoveries for replica in self.status().replicas)

    def run_client(
        self, *arguments: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`python -m client …` as a user of this deployment would call it; `environment` replaces variables."""
        command = [sys.executable, "-m", "client", *arguments]
        return subprocess.run(
            command,
            env=self.environment | environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def close_client(self) -> None:
        """Disconnect; the next use of `client` connects anew."""
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    # --------------------------------------------------------------------------------------------- kill, wait

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one process by its name in the ready file; its pid."""
        pid = self.pids[name]
        os.kill(pid, number)
        return pid

    def wait_until(self, condition: Callable[[], _Value], timeout_s: float, what: str) -> _Value:
        """The first true value of `condition`. Fails with the log when there is none in time or launch.py has ended."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"launch.py ended before: {what}\n{self.text}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.text}"
            time.sleep(_POLL_S)
        return value

    def wait_in_service(self, names: Sequence[str], not_pids: Sequence[int] = (), timeout_s: float = 60.0) -> None:
        """Until the workers named are ready, in processes other than those that were killed."""

        def ready() -> bool:
            living = {w.worker_id for w in self.status().workers if w.state == "ready" and w.pid not in not_pids}
            return living.issuperset(names)

        self.wait_until(ready, timeout_s, f"{', '.join(names)} in service")

    def wait_idle(self, timeout_s: float = 10.0) -> Sequence[ReplicaStatus]:
        """Until no request is left and every block of every living replica is free again."""

        def idle() -> Sequence[ReplicaStatus]:
            status = self.status()
            busy = status.requests or status.waiting
            leaking = any(replica.running or replica.free_blocks != replica.total_blocks for replica in status.replicas)
            return () if busy or leaking else status.replicas

        return self.wait_until(idle, timeout_s, "no request left and every block free")

    @contextmanager
    def whole_and_idle(self, names: Sequence[str]) -> Iterator[None]:
        """For tests that share it: it is so before the body, and must be found so again after it."""
        self.wait_in_service(names)
        self.wait_idle()
        yield
        self.wait_in_service(names)
        self.wait_idle()
