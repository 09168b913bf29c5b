"""One progress bar on stderr for anything that counts bytes. Knows nothing of what is being counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def byte_progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield `set_done(bytes_done)`. On a terminal a bar is drawn; elsewhere one line says what goes on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{description} ...", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)
