"""Our stderr, shared by the logs of all processes and by progress bars while workers load their weights.

A worker reports progress by lines "@progress 0.42"; here they become bars, below which nothing is ever written.
"""

from __future__ import annotations

import re
import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

_LINE = re.compile(r"@progress (\d(?:\.\d+)?)\s*")


def fraction_of(line: str) -> float | None:
    """The fraction that a line reports, None if it is an ordinary line."""
    match = _LINE.fullmatch(line)
    return float(match[1]) if match else None


class Terminal:
    """A text stream for logs, and one bar a loading worker. Safe to use from any thread.

    The bars go when all are full or `close_bars` is called. Where stderr is no terminal there are none.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._closed = not self._console.is_terminal
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def write(self, text: str) -> int:
        """Whole lines, above the bars if there are any."""
        with self._lock:
            if self._progress is not None:
                self._console.print(Text(text.rstrip("\n")), soft_wrap=True, highlight=False)
            else:
                stream = self._console.file if self._console.file is not None else sys.stderr
                stream.write(text)
                stream.flush()
        return len(text)

    def flush(self) -> None:
        """Nothing is ever held back."""

    def progress(self, name: str, fraction: float) -> None:
        """`name` has loaded this much of its weights."""
        with self._lock:
            if self._closed:
                return
            if self._progress is None:
                columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
                self._progress = Progress(
                    *columns,
                    console=self._console,
                    transient=True,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._progress.start()
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(f"{name} loads weights", total=1.0)
            self._progress.update(self._tasks[name], completed=fraction, refresh=True)
            if self._progress.finished:
                self._stop()

    def close_bars(self) -> None:
        """Remove the bars for good."""
        with self._lock:
            self._stop()
            self._closed = True

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()
