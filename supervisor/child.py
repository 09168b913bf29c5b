"""One child process: started by exec, seen dying through a pidfd, its last log lines kept. Knows no protocol."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO

from protocol import logs
from protocol.lifeline import SUPERVISOR_ENV
from supervisor.terminal import Terminal, fraction_of

_TAIL_LINES = 20


class Child:
    """A running process. Start it from the main thread: the kernel ties its life to the thread that started it.

    It gets a session of its own, so a Ctrl-C at the terminal reaches the supervisor alone. Its output is passed on to
    `terminal` line by line. `pass_fds`: descriptors that it inherits under the same numbers.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        terminal: Terminal,
        incarnation: str = "",
        pass_fds: tuple[int, ...] = (),
    ):
        self.name = name
        self._terminal = terminal
        self.incarnation = incarnation
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            env={**environment, SUPERVISOR_ENV: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        """Readable once the process has ended."""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _forward(self, lines: IO[bytes]) -> None:
        with suppress(ValueError, OSError):  # our own stderr was closed, or the pipe at exit
            for line in lines:
                text = line.decode(errors="replace")
                if (fraction := fraction_of(text)) is not None:
                    self._terminal.progress(self.name, fraction)
                    continue
                if text.strip():
                    self._tail.append(text.strip())
                self._terminal.write(text)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process itself. Nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> str:
        """Collect the ended process and what it left in its session; return how it ended, as words."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before wait(): until then nobody else can have this number
        code = self._process.wait()
        os.close(self.pidfd)
        self._reader.join(timeout=1.0)
        return describe_exit(code)

    def last_words(self, how: str, was_ready: bool) -> str:
        """How it ended (as `reap` says), with its last line where that may tell why: not after a kill in service."""
        telling = not was_ready or how.startswith("exit code")
        return f"{how}: {logs.message_of(self._tail[-1])}" if self._tail and telling else how


def describe_exit(code: int) -> str:
    """A return code of subprocess as words: "exit code 3", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
