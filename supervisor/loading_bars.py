"""Progress bars for workers that load weights. A worker reports by lines "@progress 0.42"; here they become bars."""

from __future__ import annotations

import logging
import re
import sys
import threading
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

_LINE = re.compile(r"@progress (\d(?:\.\d+)?)\s*")


def fraction_of(line: str) -> float | None:
    """The fraction that a line reports, None if it is an ordinary line."""
    match = _LINE.fullmatch(line)
    return float(match[1]) if match else None


class LoadingBars:
    """One bar a worker, on stderr, gone when all are full or `close` is called. Draws nothing where no terminal is.

    `update` may be called from any thread. Log lines written meanwhile appear above the bars.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._closed = not self._console.is_terminal
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def update(self, name: str, fraction: float) -> None:
        """`name` has loaded this much of its weights."""
        with self._lock:
            if self._closed:
                return
            if self._progress is None:
                self._progress = self._start()
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(f"{name} loads weights", total=1.0)
            self._progress.update(self._tasks[name], completed=fraction)
            if self._progress.finished:
                self._stop()

    def close(self) -> None:
        """Remove the bars for good."""
        with self._lock:
            self._stop()
            self._closed = True

    def _start(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        progress = Progress(*columns, console=self._console, transient=True)
        progress.start()  # from now on sys.stderr writes above the bars
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                self._handlers.append((handler, handler.setStream(sys.stderr) or sys.stderr))
        return progress

    def _stop(self) -> None:
        if self._progress is None:
            return
        self._progress.stop()
        self._progress = None
        self._tasks.clear()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
