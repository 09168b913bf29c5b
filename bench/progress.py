"""Rich progress bars for the rounds of a measurement."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.record import RequestRecord
from bench.stats import RunStats


class ProgressBars:
    """A bar for each run (see bench.rounds.Watcher), which ends with its throughput. A context manager."""

    def __init__(self, console: Console):
        # Drawn from the calls below and never from a thread of its own, which would disturb the measured clients.
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=console, auto_refresh=False,
        )  # fmt: skip

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def start(self, label: str, num_requests: int) -> None:
        self._task = self._progress.add_task(label, total=num_requests, note="")
        self._progress.refresh()

    def request_done(self, record: RequestRecord) -> None:
        self._progress.update(self._task, advance=1, refresh=True)

    def end(self, stats: RunStats) -> None:
        note = f"{stats.output_tokens_per_s:.1f} tok/s" + (f", {stats.failed} failed" if stats.failed else "")
        self._progress.update(self._task, note=note, refresh=True)
