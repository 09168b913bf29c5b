"""A file of Chrome's trace events: a JSON array, closed properly even when the recording is cut short."""

from __future__ import annotations

from types import TracebackType
from typing import BinaryIO

_OPENING = b"[\n"
_CLOSING = b'{"ph":"M","name":"trace_ended","pid":0,"tid":0,"args":{}}\n]\n'


class TraceFile:
    """Use as `with TraceFile(open(path, "wb")) as file:`; closes what it is given."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.events = 0

    def __enter__(self) -> TraceFile:
        self._file.write(_OPENING)
        return self

    def write(self, events: bytes) -> None:
        """Add a piece as the server sent it: whole events, a line each."""
        self._file.write(events)
        self.events += events.count(b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.write(_CLOSING)
        self._file.close()
