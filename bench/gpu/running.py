"""One step as a process group of its own: its output goes to a file, and at its limit all of it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 10.0
"""Between asking a group to end (pytest then writes its report) and ending it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step. code: its exit code; None: it ran past its limit and was ended."""

    code: int | None
    seconds: float


def run_limited(argv: Sequence[str], log: Path, limit_s: float, cwd: Path, environment: Mapping[str, str]) -> Outcome:
    """Run it for at most limit_s, and GRACE_S more to end. Raises OSError if it cannot be started."""
    began = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, cwd=cwd, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
    code: int | None = None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left
        process.wait()
    return Outcome(code, time.monotonic() - began)
