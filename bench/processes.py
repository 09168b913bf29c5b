"""Servers that a benchmark starts for itself, and stops again with everything they started.

Each is the leader of a process group of its own; stopping asks the leader first (so that it can stop its children in
its own order), and then ends what is left of the group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

STOP_GRACE_S = 10.0


class StartFailed(Exception):
    """A server ended or stayed silent before it was ready. The message has the end of its log."""


class ServerProcess:
    """One started command; its output goes to `log`. Use as a context manager, or call `stop`."""

    def __init__(self, argv: list[str], log: Path, cwd: Path | None = None, env: dict[str, str] | None = None):
        self.argv = argv
        self.log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=cwd, env=env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Of the leader; also the id of the process group."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> float:
        """Poll `ready` until it holds; return the seconds since this call. Raises StartFailed."""
        start = time.monotonic()
        while not ready():
            if (code := self._process.poll()) is not None:
                raise StartFailed(f"{self._line()} ended with code {code} before it was ready\n{self._log_end()}")
            if time.monotonic() - start > timeout_s:
                raise StartFailed(f"{self._line()} was not ready after {timeout_s:g} s\n{self._log_end()}")
            try:
                self._process.wait(0.1)  # the pause between polls, cut short by the process's end
            except subprocess.TimeoutExpired:
                pass
        return time.monotonic() - start

    def stop(self) -> None:
        """End the whole group; returns when the leader is reaped. Harmless when it has ended already."""
        try:
            self._process.terminate()
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _line(self) -> str:
        return f"{shlex.join(self.argv)!r}"

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([f"--- the end of {self.log}", *lines])


def answers(url: str) -> bool:
    """Whether an HTTP GET of `url` gives a 2xx status now."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(200 <= response.status < 300)
    except (urllib.error.URLError, OSError):
        return False


def start_command(command: str, ready_url: str, log: Path, timeout_s: float) -> tuple[ServerProcess, float]:
    """Start a shell-quoted command line (no shell runs it) and wait for `ready_url`: (process, seconds it took).

    Raises ValueError if something answers at that URL already: it would be measured in the command's stead.
    """
    if answers(ready_url):
        raise ValueError(f"{ready_url} answers already, before {command!r} was started")
    server = ServerProcess(shlex.split(command), log)
    return _ready(server, lambda: answers(ready_url), timeout_s)


def start_pageplane(
    arguments: str, ready_file: Path, log: Path, timeout_s: float
) -> tuple[ServerProcess, float, dict[str, Any]]:
    """Start `launch.py ARGUMENTS` of this checkout: (process, seconds until ready, contents of its ready file)."""
    root = Path(__file__).resolve().parent.parent
    argv = [sys.executable, str(root / "launch.py"), "--ready-file", str(ready_file), "--port", "0"]
    argv += shlex.split(arguments)
    server, took = _ready(ServerProcess(argv, log, cwd=root), ready_file.exists, timeout_s)
    return server, took, json.loads(ready_file.read_text())


def _ready(server: ServerProcess, ready: Callable[[], bool], timeout_s: float) -> tuple[ServerProcess, float]:
    try:
        return server, server.wait_until(ready, timeout_s)
    except BaseException:  # also Ctrl-C while it starts: nothing may stay behind
        server.stop()
        raise
