"""`python -m client status`: workers, queues, blocks and hit rate, once or every second."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.commands.options import parser
from client.errors import ServerUnavailable
from client.sync import Client
from protocol.messages import ReplicaStatus, Status

_REFRESH_S = 1.0
_COLOURS = {"ready": "green", "starting": "yellow", "dead": "red"}


def main(arguments: list[str]) -> int:
    """Show the status; return the exit code."""
    command = parser(" status", "Watch workers, queues and blocks, refreshed every second. Ctrl-C leaves.")
    command.add_argument("--once", action="store_true", help="print once (as it is done without a terminal)")
    command.add_argument("--json", action="store_true", help="print once, as JSON")
    options = command.parse_args(arguments)
    with Client(options.endpoint) as client:
        name = client.server_info().model_name
        status = client.status()
        if options.json:
            print(json.dumps({"model": name, **as_dict(status)}, indent=2))
        elif options.once or not sys.stdout.isatty():
            console = Console() if sys.stdout.isatty() else Console(width=140)
            console.print(render(name, status, None, 0.0))
        else:
            _watch(client, name, status)
    return 0


def _watch(client: Client, name: str, status: Status) -> None:
    before: Status | None = None
    note = ""
    taken = previous = time.monotonic()
    with Live(render(name, status, None, 0.0), auto_refresh=False) as live:
        while True:
            time.sleep(_REFRESH_S)
            try:
                before, status, note = status, client.status(), ""
                previous, taken = taken, time.monotonic()
            except ServerUnavailable as error:  # it may come back
                note = str(error)
            live.update(render(name, status, before, taken - previous, note), refresh=True)


def render(name: str, now: Status, before: Status | None, seconds: float, note: str = "") -> RenderableType:
    """One snapshot as tables; rates are against the snapshot `seconds` earlier."""
    workers = Table(title="workers", title_justify="left")
    for heading in ("worker", "state", "pid", "replica", "epoch", "device", "dtype", "attention backend"):
        workers.add_column(heading, justify="right" if heading in ("pid", "replica", "epoch") else "left")
    for worker in now.workers:
        workers.add_row(
            worker.worker_id,
            Text(worker.state, style=_COLOURS.get(worker.state, "")),
            str(worker.pid),
            str(worker.replica),
            str(worker.epoch),
            worker.device,
            worker.dtype,
            worker.attention_backend,
        )
    replicas = Table(title="replicas", title_justify="left")
    headings = (
        "replica",
        "state",
        "running",
        "blocks used",
        "cached",
        "hit rate",
        "tokens/s",
        "preempted",
        "recovered",
    )
    for heading in headings:
        replicas.add_column(heading, justify="left" if heading in ("replica", "state") else "right")
    earlier = {replica.replica: replica for replica in before.replicas} if before else {}
    for replica in now.replicas:
        replicas.add_row(
            str(replica.replica),
            Text(replica.state, style=_COLOURS.get(replica.state, "")),
            str(replica.running),
            _used(replica),
            f"{replica.cached_blocks:,}",
            f"{replica.prefix_hits / replica.prefix_queries:.1%}" if replica.prefix_queries else "–",
            _rate(replica, earlier.get(replica.replica), seconds),
            f"{replica.preemptions:,}",
            f"{replica.recoveries:,}",
        )
    head = Text.assemble(
        (name, "bold"), f"  up {_duration(now.uptime_s)}, {now.requests} requests, {now.waiting} of them waiting"
    )
    if now.dropped_frames:
        head.append(f", {now.dropped_frames} bad frames dropped", style="yellow")
    return Group(head, workers, replicas, *([Text(note, style="red")] if note else []))


def _used(replica: ReplicaStatus) -> str:
    used = replica.total_blocks - replica.free_blocks
    return f"{used:,} / {replica.total_blocks:,} ({used / replica.total_blocks:.0%})" if replica.total_blocks else "–"


def _rate(now: ReplicaStatus, before: ReplicaStatus | None, seconds: float) -> str:
    if before is None or seconds <= 0 or now.generated_tokens < before.generated_tokens:
        return "–"
    return f"{(now.generated_tokens - before.generated_tokens) / seconds:,.0f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def as_dict(value: Any) -> Any:
    """A struct as an object with field names (on the wire it is an array)."""
    if isinstance(value, msgspec.Struct):
        return {name: as_dict(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, tuple):
        return [as_dict(item) for item in value]
    return value
