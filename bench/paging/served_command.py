"""`python -m bench paging memory` and `… blocks`: the experiments that start real servers, and their file of parts.

The JSON file: schema 1 and parts, each as bench/paging/memory.py or bench/paging/blocks.py says. With --add a part
replaces the one of the same experiment, model and load that the file has, and the rest of it stays: so a machine that
has quiet minutes, but few, can be measured in pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape

from bench.machine import describe_machine
from bench.paging import blocks, memory, served_report
from bench.paging.blocks import BlockSettings
from bench.paging.experiments import Progress
from bench.paging.memory import LOADS, MemorySettings
from bench.paging.models import MODELS
from bench.paging.served import ServedFailed
from bench.processes import StartFailed
from bench.target import TargetError
from client import ClientError

TINY_MEMORY = MemorySettings(memories=(1, 2, 4, 8, 16), requests=48)
TINY_BLOCKS = BlockSettings(block_sizes=(1, 4, 16, 32, 64, 128))
QUICK_MEMORY = MemorySettings(memories=(1,), rounds=1, alone_requests=1, profile_steps=8)
QUICK_BLOCKS = BlockSettings(block_sizes=(16, 128), rounds=1, profile_steps=8)


def run(args: argparse.Namespace, console: Console) -> int:
    """Exit code 2: nothing could be measured."""
    parts: list[dict[str, Any]] = []
    try:
        if args.add and args.json is None:
            raise ValueError("--add needs --json, the file to add to")
        if args.rounds < 0:
            raise ValueError("--rounds must not be negative")
        if args.add and args.json.exists():
            parts = json.loads(args.json.read_text())["parts"]
        with console.status("starting") as status:
            for measured in _measure(args, status.update if console.is_terminal else _log()):
                parts = [part for part in parts if _key(part) != _key(measured)] + [measured]
    except (ValueError, KeyError, StartFailed, ServedFailed, TargetError, ClientError) as error:
        console.print(f"[red]bench paging {args.experiment}:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps({"schema": 1, "parts": parts}, indent=1) + "\n")
    for table in served_report.tables(parts):
        console.print(table)
    if args.plot is not None:
        served_report.write_plot(parts, args.plot)
    return 0


def _log() -> Progress:
    """What is going on as lines on stderr, with the seconds since the start."""
    started = time.monotonic()
    return lambda text: print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)


def _key(part: dict[str, Any]) -> tuple[str, ...]:
    return (part["experiment"], part["model"]["name"], part["load_name"])


def _measure(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """All parts that the flags ask for, one after the other."""
    measured = []
    for name in [args.model] if args.model else ["tiny"] if args.quick else list(MODELS):
        model = MODELS[name]
        if args.experiment == "blocks":
            by_size = QUICK_BLOCKS if args.quick else TINY_BLOCKS if name == "tiny" else BlockSettings()
            by_size = replace(by_size, rounds=args.rounds or by_size.rounds)
            measured.append(_part(blocks.measure(model, by_size, progress)))
            continue
        by_memory = QUICK_MEMORY if args.quick else TINY_MEMORY if name == "tiny" else MemorySettings()
        by_memory = replace(by_memory, rounds=args.rounds or by_memory.rounds)
        for load in [args.load] if args.load else ["shared"] if args.quick else list(LOADS):
            measured.append(_part(memory.measure(model, load, by_memory, progress)))
    return measured


def _part(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Where it comes from, and what was measured."""
    origin = {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }
    return origin | asyncio.run(measuring)
