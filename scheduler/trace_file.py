"""The trace of a deployment as a file: the supervisor begins it, each scheduler of the deployment adds to it.

A JSON array whose end may be missing, which readers of the trace event format allow: a process killed with -9 leaves a
file that can be read. Each chunk is written at once, so no event is cut by that.
"""

from __future__ import annotations

import os
from pathlib import Path

CLOSING = b'{"ph":"M","name":"trace_ended","pid":0,"tid":0,"args":{}}\n]\n'


class TraceFile:
    """Appends to `path`, which exists already."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, events: bytes, last: bool) -> None:
        """Add events; with `last` the array is closed. Raises OSError."""
        rest = memoryview(events + CLOSING if last else events)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
