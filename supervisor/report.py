"""What the supervisor tells people (a table) and programs (the ready file)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from protocol.config import EngineConfig
from protocol.messages import WorkerStatus
from protocol.runtime import Endpoints


def print_table(
    config: EngineConfig,
    endpoints: Endpoints,
    scheduler_pid: int,
    workers: Iterable[tuple[str, WorkerStatus | None, str]],
    seconds: float,
    console: Console | None = None,
    gateway: tuple[str, int | None] | None = None,
) -> None:
    """workers: (id, what the scheduler knows of it or None, what is wrong with it if it is not ready).
    gateway: its address and pid (None: not running now); None: the deployment has none."""
    console = console or Console()
    table = Table(title=f"{config.model_name}, ready after {seconds:.1f} s", title_justify="left")
    for heading in ("process", "pid", "device", "backend", "KV blocks", "KV tokens"):
        table.add_column(heading, justify="right" if heading.startswith("KV") or heading == "pid" else "left")
    table.add_row("scheduler", str(scheduler_pid), "", "", "", "")
    if gateway is not None:
        table.add_row("gateway", str(gateway[1] or ""), "", "" if gateway[1] else "not running", "", "")
    reasons: dict[str, list[str]] = {}
    for worker_id, status, problem in workers:
        if status is None:
            table.add_row(worker_id, "", "", "not running", "", "", style="red")
            reasons.setdefault(f"not running: {problem}", []).append(worker_id)
            continue
        usable = status.num_blocks - 1  # one is the null block
        device = f"{status.device}, {status.dtype}"
        blocks, tokens = f"{usable:,}", f"{usable * status.block_size:,}"
        table.add_row(worker_id, str(status.pid), device, status.attention_backend, blocks, tokens)
        reasons.setdefault(status.backend_reason, []).append(worker_id)
    console.print(table)
    for reason, names in reasons.items():
        console.print(f"{', '.join(names)}: {reason}", style="dim", highlight=False, soft_wrap=True, markup=False)
    console.print('Ask:    python -m client "What is the capital of France?"', highlight=False)
    console.print("Chat:   python -m client chat", highlight=False)
    console.print("Watch:  python -m client status", highlight=False)
    if gateway is not None:
        console.print(f"Look:   {gateway[0]}/ (the live page)", highlight=False, soft_wrap=True)
        console.print(
            f"HTTP:   {gateway[0]}/v1 (OpenAI's API; described at {gateway[0]}/docs)", highlight=False, soft_wrap=True
        )
    console.print(f"Clients connect to {endpoints.client}. Stop with Ctrl-C.", highlight=False, soft_wrap=True)


def write_ready_file(path: Path, endpoints: Endpoints, pids: dict[str, int], http: str | None = None) -> None:
    """Whole or not at all. http: the gateway's address, if there is a gateway."""
    addresses = {"client": endpoints.client, "worker": endpoints.worker, "control": endpoints.control}
    content = {"endpoints": addresses | ({"http": http} if http else {}), "pids": pids}
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)
