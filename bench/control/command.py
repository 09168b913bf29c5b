"""`python -m bench control`: the real scheduler core with scripted results, beside vLLM's under the same loads."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.control import report
from bench.control.conductor import Case, Side, SideFailed, measure, our_command, vllm_command
from bench.control.gap import gap_cases, measure_gap
from bench.control.steady_load import LoadFailed
from bench.control.summary import slopes, summarise
from bench.machine import describe_machine
from bench.processes import StartFailed

EXAMPLES = """\
examples:
  python -m bench control --quick
  python -m bench control --gap --json gap.json
  python -m bench control --vllm-python ~/vllm/bin/python --model FOLDER --json control.json --plot control.png
The keys of the JSON file are documented in bench/control/summary.py.
"""


def cases(quick: bool) -> list[Case]:
    """What is measured, in order."""
    sizes = {64: 96, 1024: 48} if quick else {64: 320, 256: 160, 1024: 96, 4096: 48}
    found = [Case(f"decode, {n:,} running", "decode", {"n": n, "steps": steps}) for n, steps in sizes.items()]
    for n in (64, 1024):
        found.append(
            Case(f"decode, {n:,} running, blocks opened together", "decode", {"n": n, "steps": 64, "aligned": True})
        )
    for n in (1024,) if quick else (64, 1024, 4096):
        found.append(Case(f"decode, {n:,} running, 2 groups", "decode", {"n": n, "steps": 48, "groups": 2}))
    for length in (1024,) if quick else (1024, 8192):
        for hit in (False, True):
            arguments = {"length": length, "hit": hit, "count": 20 if quick else 60}
            found.append(
                Case(f"admission, {length:,} tokens, {'all' if hit else 'none'} cached", "admission", arguments)
            )
    size = 64 if quick else 512
    shared = {"prefixes": 4, "prefix_len": 2048, "unique_len": 64, "output_len": 16 if quick else 128}
    found.append(
        Case(
            f"shared prefixes, {size} requests",
            "shared_prefix",
            {"requests": size, "blocks": 900 if quick else 4096, **shared},
        )
    )
    found.append(
        Case("block pool", "pool", {"blocks": 20_000 if quick else 100_000, "count": 5_000 if quick else 20_000})
    )
    return found


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "control",
        help="the scheduler alone: time and bytes per step, admission, block primitives",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--vllm-python", metavar="PYTHON", help="the interpreter of an environment with vLLM, to run beside us")
    add("--model", type=Path, metavar="FOLDER", help="for vLLM: a folder with a Llama model's config.json")
    add("--rounds", type=int, default=3, help="times each side runs each case, in turns (%(default)s)")
    add("--gap", action="store_true", help="instead: how long a worker waits between steps, with real processes")
    add("--quick", action="store_true", help="fewer and smaller cases: under 45 s without vLLM")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.vllm_python and not args.model:
        console.print("[red]--vllm-python needs --model[/]: vLLM reads a model's config.json")
        return 2
    if args.rounds < 1:
        console.print("[red]--rounds must be at least 1[/]")
        return 2
    if args.gap:
        return _run_gap(args, console)
    chosen = cases(args.quick)
    started = datetime.now(UTC)
    try:
        with ExitStack() as stack, console.status("starting") as status:
            sides = [stack.enter_context(Side(our_command()))]
            if args.vllm_python:
                sides.append(stack.enter_context(Side(vllm_command(args.vllm_python, args.model.resolve()))))
            answers = measure(sides, chosen, args.rounds, status.update)
    except SideFailed as error:
        console.print(f"[red]{error}[/]", highlight=False, soft_wrap=True)
        return 1
    names = [side.name for side in sides]
    decode_cases = {case.label: case.arguments for case in chosen if case.name == "decode"}
    result: dict[str, Any] = {
        **_about(started),
        "sides": names,
        "rounds": args.rounds,
        "cases": summarise(answers, names),
        "decode_cases": decode_cases,
        "slopes": {name: slopes(answers, decode_cases, name) for name in names},
    }
    machine = result["machine"]
    console.print(report.table(result["cases"], names, f"medians of {args.rounds} rounds in turns; {machine['cpu']}"))
    for name, slope in result["slopes"].items():
        if slope:
            console.print(
                f"{name}: a decode step takes {slope['base_us']:.0f} µs + {slope['per_row_us']:.3f} µs for each "
                f"running request + {slope['per_block_us']:.2f} µs for each block handed out",
                highlight=False,
                soft_wrap=True,
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        report.write_plot(result, args.plot)
    return 0


def _run_gap(args: argparse.Namespace, console: Console) -> int:
    started = datetime.now(UTC)
    gaps: dict[str, dict[str, Any]] = {}
    try:
        with console.status("starting") as status:
            for case in gap_cases(args.quick):
                gaps[case.label] = measure_gap(case, status.update)
    except (StartFailed, LoadFailed) as error:
        console.print(f"[red]{error}[/]", highlight=False, soft_wrap=True)
        return 1
    result = {**_about(started), "gaps": gaps}
    console.print(report.gap_table(gaps, result["machine"]["cpu"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _about(started: datetime) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "started_at": started.isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }
