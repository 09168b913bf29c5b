"""`python -m bench gpu`: on a machine with a GPU, tests first and then all timings, within the minutes there are.

Needs no network. What is not installed there can be brought along as wheels; a step that lacks a package is left out,
and the summary says which. Every step has a log, and the table with all verdicts comes last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.gpu.environment import CannotInstall, describe, install, missing_modules
from bench.gpu.plan import Step, argv_within, left_out, schedule, steps_of
from bench.gpu.report import GpuReport, StepReport, count_tests, print_report
from bench.gpu.running import run_limited
from bench.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = """\
examples:
  python -m bench gpu --minutes 8 --out results/gpu
  python -m bench gpu --minutes 4 --only tiles --out results/gpu-2
  python -m bench gpu --dry-run
The keys of summary.json are documented in bench/gpu/report.py, those of kernels.json in bench/kernels/results.py.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "gpu",
        help="everything that only a GPU can tell: tests, then timings",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="time for everything (%(default)s)")
    add("--out", type=Path, default=Path("results/gpu"), metavar="DIR", help="folder of all files (%(default)s)")
    add("--only", metavar="STEP", help="only steps whose name begins so")
    add("--wheels", type=Path, metavar="DIR", help="install these wheels first, for this run only")
    add("--quick", action="store_true", help="only a few timings, in under 45 s")
    add("--json", type=Path, metavar="FILE", help="write the summary here, too")
    add("--dry-run", action="store_true", help="show the steps, their limits and what is missing; run nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if a step failed or was left out, or 2 if nothing could be run."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        try:
            if not args.minutes > 0:
                raise ValueError("--minutes must be positive")
            site = _install(args.wheels, stack)
            out = args.out.resolve()
            minutes, only = (0.75, "kernels") if args.quick else (args.minutes, args.only)
            xdist = not missing_modules(("xdist",), site)
            steps = steps_of(out, minutes, only, (os.cpu_count() or 1) if xdist else 1)
        except (ValueError, CannotInstall) as error:
            return _refuse(console, str(error))
        if args.dry_run:
            Console().print(_plan_table(steps, minutes, site))
            return 0
        environment = describe()
        if not environment["cuda_visible"]:
            return _refuse(console, "torch sees no CUDA device here; --dry-run shows what would be run")
        out.mkdir(parents=True, exist_ok=True)
        report = GpuReport(
            command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            minutes=minutes,
            environment=environment,
        )
        run_steps(steps, report, out, site, args.quick, console)
    report.write(out / "summary.json")
    if args.json is not None:
        report.write(args.json)
    print_report(report, out, Console(width=max(Console().width, 160)))
    return 0 if report.ok else 1


def run_steps(
    steps: list[Step], report: GpuReport, out: Path, site: Path | None, quick: bool, console: Console
) -> None:
    """One after the other; the report is written after each, since the machine may be gone before the end."""
    deadline = time.monotonic() + report.minutes * 60
    folders = [str(ROOT), *([str(site)] if site is not None else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    for step in steps:
        left_s = deadline - time.monotonic()
        limit_s = step.limit_s(left_s)
        argv = argv_within(step, limit_s) + (["--quick"] if quick else [])
        reason = left_out(step, left_s, lambda names: missing_modules(names, site))
        code, seconds = None, 0.0
        if reason is None:
            console.print(f"{step.name}: at most {limit_s:.0f} s", highlight=False)
            outcome = run_limited(argv, out / step.log, limit_s, ROOT, environment)
            code, seconds = outcome.code, outcome.seconds
        report.steps.append(
            StepReport(step.name, argv, limit_s, seconds, code, reason, step.log, count_tests(out / f"{step.name}.xml"))
        )
        report.write(out / "summary.json")


def _install(wheels: Path | None, stack: ExitStack) -> Path | None:
    """The folder with what the wheels hold, gone when the stack ends; None without wheels. Raises CannotInstall."""
    if wheels is None:
        return None
    site = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-site-")))
    install(wheels, site)
    return site


def _plan_table(steps: list[Step], minutes: float, site: Path | None) -> Table:
    table = Table(title=f"What a run of {minutes:g} minutes would do", show_lines=True)
    table.add_column("step")
    table.add_column("at most, s", justify="right")
    table.add_column("command", overflow="fold")
    table.add_column("missing here")
    for step, limit_s in schedule(steps, minutes):
        absent = ", ".join(missing_modules(step.needs, site)) or "–"
        table.add_row(step.name, f"{limit_s:.0f}", escape(shlex.join(argv_within(step, limit_s))), absent)
    return table


def _refuse(console: Console, message: str) -> int:
    console.print(f"[red]bench gpu:[/] {escape(message)}", highlight=False, soft_wrap=True)
    return 2
