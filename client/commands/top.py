"""`python -m client top`: the essence of a running server in a terminal, refreshed every second. q or Ctrl-C leaves."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from client.commands.options import parser
from client.errors import ServerUnavailable
from client.sync import Client
from protocol.histograms import BOUNDS, STAGE_S, STAGES
from protocol.messages import HistogramData, MetricsSnapshot, ReplicaStatus

_REFRESH_S = 1.0
_COLOURS = {"ready": "green", "dead": "red", "down": "red", "refused": "red"}
_NARROW = 100
"""Columns below which the rarer numbers are left out."""


class Reading(NamedTuple):
    """A snapshot and when it was taken, seconds."""

    snapshot: MetricsSnapshot
    at: float


def main(arguments: list[str]) -> int:
    """Show it; return the exit code."""
    command = parser(" top", "Watch replicas, blocks, requests and speed. q or Ctrl-C leaves.")
    command.add_argument("--once", action="store_true", help="print once (as it is done without a terminal)")
    options = command.parse_args(arguments)
    with Client(options.endpoint, timeout_s=3.0) as client:
        name = client.server_info().model_name
        first = Reading(client.metrics(), time.monotonic())
        if options.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            console = Console() if sys.stdout.isatty() else Console(width=120)
            console.print(render(name, first, None))
        else:
            _watch(client, name, first)
    return 0


def _watch(client: Client, name: str, now: Reading) -> None:
    before: Reading | None = None
    note = ""
    with _keys() as key_pressed, Live(render(name, now, None), screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(name, now, before, note), refresh=True)
            deadline = time.monotonic() + _REFRESH_S
            while (left := deadline - time.monotonic()) > 0:
                if key_pressed(left) == "q":
                    return
                live.refresh()  # the window may have another size
            try:
                before, now, note = now, Reading(client.metrics(), time.monotonic()), ""
            except ServerUnavailable as error:  # it may come back
                note = str(error)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Single keys without Enter: a function that waits up to so many seconds for one, or for another window size, and
    returns the key or "". The terminal is as before afterwards."""
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    resized, resize = os.pipe()
    os.set_blocking(resize, False)
    old_wakeup = signal.set_wakeup_fd(resize, warn_on_full_buffer=False)
    old_handler = signal.signal(signal.SIGWINCH, lambda number, frame: None)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([terminal, resized], [], [], seconds)
        if resized in ready:
            os.read(resized, 4096)
        return os.read(terminal, 1).decode(errors="replace") if terminal in ready else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, settings)
        signal.signal(signal.SIGWINCH, old_handler)
        signal.set_wakeup_fd(old_wakeup)
        os.close(resized)
        os.close(resize)


class BlockBar:
    """Blocks of a replica in one line as wide as there is room: █ in use, ▒ cached and free, · free."""

    def __init__(self, replica: ReplicaStatus):
        total = replica.total_blocks
        used = total - replica.free_blocks
        self._used = used / total if total else 0.0
        self._cached = min(replica.free_blocks, max(0, replica.cached_blocks - used)) / total if total else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        used = min(width, max(round(self._used * width), 1 if self._used else 0))
        cached = min(width - used, round(self._cached * width))
        yield Segment("█" * used, Style.parse("cyan"))
        yield Segment("▒" * cached, Style.parse("blue"))
        yield Segment("·" * (width - used - cached), Style.parse("dim"))


def render(name: str, now: Reading, before: Reading | None, note: str = "") -> RenderableType:
    """One reading; rates and latencies are of the time since `before`, or of all time."""
    return _Screen(name, now, before, note)


class _Screen:
    def __init__(self, name: str, now: Reading, before: Reading | None, note: str):
        self._name, self._now, self._before, self._note = name, now, before, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _NARROW
        parts: list[RenderableType] = [
            self._head(),
            self._replicas(wide),
            self._latencies(),
            self._stages(),
            self._pace(),
        ]
        parts.append(self._workers(wide))
        if self._note:
            parts.append(Text(self._note, style="red"))
        yield Group(*parts)

    def _head(self) -> Text:
        status = self._now.snapshot.status
        ready = sum(replica.state == "ready" for replica in status.replicas)
        text = Text.assemble((self._name, "bold"), f"  up {_duration(status.uptime_s)}  ")
        text.append(f"{ready} of {len(status.replicas)} replicas", "green" if ready == len(status.replicas) else "red")
        text.append(f"  {status.requests} requests, {status.waiting} waiting")
        text.append(f"  {self._tokens_per_s(None)} tokens/s")
        return text

    def _replicas(self, wide: bool) -> Table:
        table = Table(expand=True, title="█ in use  ▒ cached  · free", title_justify="right", title_style="dim")
        table.add_column("replica", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("blocks", ratio=1, no_wrap=True)
        headings = ["used", "running", "tokens/s", "hit rate"]
        for heading in headings + (["preempted", "recovered"] if wide else []):
            table.add_column(heading, justify="right", no_wrap=True)
        for replica in self._now.snapshot.status.replicas:
            used = replica.total_blocks - replica.free_blocks
            cells: list[RenderableType] = [
                str(replica.replica),
                Text(replica.state, style=_COLOURS.get(replica.state, "")),
                BlockBar(replica),
                f"{used:,} / {replica.total_blocks:,}" if replica.total_blocks else "–",
                str(replica.running),
                self._tokens_per_s(replica.replica),
                f"{replica.prefix_hits / replica.prefix_queries:.0%}" if replica.prefix_queries else "–",
            ]
            if wide:
                cells += [f"{replica.preemptions:,}", f"{replica.recoveries:,}"]
            table.add_row(*cells)
        return table

    def _latencies(self) -> Table:
        table = Table(expand=True)
        table.add_column("all replicas, ms", no_wrap=True)
        for heading in ("median", "p99"):
            table.add_column(heading, justify="right", no_wrap=True)
        rows = (
            ("time to first token", "time_to_first_token_seconds"),
            ("between tokens", "inter_token_latency_seconds"),
            ("in the queue", "request_queue_time_seconds"),
        )
        for title, metric in rows:
            counts = self._counts(metric)
            found = [quantile(BOUNDS[metric], counts, q) for q in (0.5, 0.99)]
            table.add_row(title, *("–" if value is None else _ms(value) for value in found))
        return table

    def _stages(self) -> Text:
        text = Text("a step spends, median ms: ")
        for stage in STAGES:
            median = quantile(STAGE_S, self._counts(stage, of_stages=True), 0.5)
            text.append(f" {stage} ", "dim")
            text.append("–" if median is None else _ms(median))
        return text

    def _pace(self) -> Text:
        text = Text("prompt tokens beside decoding: ")
        for metrics in self._now.snapshot.replicas:
            text.append(f" replica {metrics.replica} ", "dim")
            text.append(f"{metrics.prefill_budget} a step, ")
            known = metrics.prefill_token_s
            text.append(f"{_ms(known)} ms each " if known else "– ms each ")
        return text

    def _workers(self, wide: bool) -> Table:
        table = Table(expand=True)
        headings = ["worker", "state", "pid", "epoch", "device", "dtype", "attention"]
        for heading in headings if wide else headings[:4]:
            table.add_column(heading, justify="right" if heading in ("pid", "epoch") else "left", no_wrap=True)
        for worker in self._now.snapshot.status.workers:
            cells: list[RenderableType] = [worker.worker_id, Text(worker.state, style=_COLOURS.get(worker.state, ""))]
            cells += [str(worker.pid), str(worker.epoch)]
            if wide:
                cells += [worker.device, worker.dtype, worker.attention_backend]
            table.add_row(*cells)
        return table

    def _tokens_per_s(self, replica: int | None) -> str:
        """Of one replica or all; nothing is known of speed before the second reading."""
        if self._before is None or self._now.at <= self._before.at:
            return "–"

        def total(reading: Reading) -> int:
            replicas = reading.snapshot.status.replicas
            return sum(r.generated_tokens for r in replicas if replica in (None, r.replica))

        new = max(0, total(self._now) - total(self._before))  # counters begin anew with the scheduler
        return f"{new / (self._now.at - self._before.at):,.0f}"

    def _counts(self, name: str, of_stages: bool = False) -> list[int]:
        """By bucket, over all replicas, since the reading before; if nothing happened since then, of all time."""

        def total(reading: Reading) -> list[int]:
            found: list[HistogramData] = [
                (replica.stages if of_stages else replica.histograms)[name] for replica in reading.snapshot.replicas
            ]
            return [sum(column) for column in zip(*(data.counts for data in found), strict=True)]

        now = total(self._now)
        if self._before is not None:
            new = [a - b for a, b in zip(now, total(self._before), strict=True)]
            if min(new, default=0) >= 0 and any(new):
                return new
        return now


def quantile(bounds: tuple[float, ...], counts: list[int], q: float) -> float | None:
    """The q-quantile of a histogram, evenly spread within its buckets (as Prometheus does); None: it is empty.

    counts: by bucket, one more than bounds; what is beyond the last bound counts as that bound.
    """
    rank = q * sum(counts)
    if not rank:
        return None
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            if index == len(bounds):
                break
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - seen) / count
        seen += count
    return bounds[-1]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
