"""`python -m bench paging`: three allocators, block sizes, and what more room is worth; closed forms beside it all.

Without a model and in virtual time, or (memory, blocks) with real servers that are started, loaded and stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import describe_machine
from bench.paging import report, served_command
from bench.paging.experiments import Settings, allocators, block_sizes, memories
from bench.paging.load import BadTrace, Load, chat, from_file, uniform
from bench.paging.memory import LOADS
from bench.paging.models import MODELS
from bench.paging.replay import DoesNotFit

EXPERIMENTS = ("books", "memory", "blocks")

EXAMPLES = """\
examples:
  python -m bench paging --quick
  python -m bench paging --json paging.json --plot paging.png
  python -m bench paging --trace lengths.jsonl      lines of {"prompt_len": 120, "output_len": 64, "arrival": 0}
  python -m bench paging memory --quick             throughput, TTFT, ITL by KV memory, with and without paging
  python -m bench paging blocks --model smollm2     steps, attention, plans, hits by block size
The keys of the JSON file are documented in bench/paging/experiments.py, memory.py and blocks.py.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "paging",
        help="three allocators on one trace, block sizes, throughput against KV memory",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("experiment", nargs="?", choices=EXPERIMENTS, default=EXPERIMENTS[0],
        help="books: no model, virtual time (default); memory, blocks: real servers, by that")  # fmt: skip
    add("--model", choices=tuple(MODELS), help="memory, blocks: only with this one (both; quick: tiny)")
    add("--load", choices=tuple(LOADS), help="memory: only this load (both; quick: shared)")
    add("--rounds", type=int, default=0, metavar="N", help="memory, blocks: measured rounds (2; quick: 1)")
    add("--add", action="store_true", help="memory, blocks: keep what the --json file holds of other models and loads")
    add("--trace", type=Path, metavar="FILE", help="lengths to use instead of the two distributions, JSON lines")
    add("--requests", type=int, default=0, metavar="N", help="requests of each distribution (400; quick: 150)")
    add("--rate", type=float, default=0.0, help="mean arrivals a step, Poisson; 0: all wait at the start (%(default)s)")
    add("--slots", type=int, default=Settings.num_slots, metavar="N", help="memory of the allocators (%(default)s)")
    add("--seed", type=int, default=1, help="of lengths and arrivals (%(default)s)")
    add("--quick", action="store_true", help="fewer sizes and requests: under 45 s")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def _loads(args: argparse.Namespace, requests: int) -> list[Load]:
    if args.trace:
        return [from_file(args.trace)]
    return [uniform(requests, args.seed, args.rate), chat(requests, args.seed, args.rate)]


def run(args: argparse.Namespace) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a file or a pipe has room for all columns
    if args.experiment != EXPERIMENTS[0]:
        return served_command.run(args, console)
    if args.requests < 0 or args.rate < 0 or args.slots < 256 or args.seed < 0:
        console.print("[red]--requests, --rate and --seed must not be negative, --slots must be at least 256[/]")
        return 2
    settings = Settings.quick() if args.quick else Settings()
    settings = Settings(**{**asdict(settings), "num_slots": args.slots})
    started = datetime.now(UTC)
    try:
        loads = _loads(args, args.requests or (150 if args.quick else 400))
        with console.status("starting") as status:
            result: dict[str, Any] = {
                "schema": 1,
                "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
                "started_at": started.isoformat(timespec="seconds"),
                "machine": describe_machine(),
                "settings": asdict(settings),
                "allocators": allocators(loads, settings, status.update),
                "block_sizes": block_sizes(settings, status.update),
                "throughput": memories(loads[-1], settings, status.update),
            }
    except (BadTrace, DoesNotFit) as error:
        console.print(f"[red]{error}[/]", highlight=False, soft_wrap=True)
        return 2
    for table in report.tables(result):
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        report.write_plot(result, args.plot)
    return 0
