"""`python -m bench kernels`: attention, cache writes, matrix products and a decode step against the machine's ceilings.

Every figure stands beside its floor (bytes over the copy bandwidth or operations over the matrix rate, both measured in
the same run) and beside torch's attention on dense K and V. The most important cases come first; none is begun that
would not end in time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.kernels.budget import Budget
from bench.kernels.cases import EXPECTED_S, Case, cpu_cases, cuda_cases, tile_cases
from bench.kernels.results import KernelsResult
from bench.machine import describe_machine

QUICK_MINUTES = 0.5
LIMIT_S = {False: 1.0, True: 0.3}
"""Seconds for the samples of one timing, by --quick."""
CPU_SHARE = 0.1
"""Of the seconds that a case is expected to take on a GPU, where most go into compiling."""

EXAMPLES = """\
examples:
  python -m bench kernels --quick
  python -m bench kernels --minutes 5 --json kernels.json --plot kernels.png
  python -m bench kernels --only decode --list
  python -m bench kernels --tiles --minutes 4 --json tiles.json
The keys of the JSON file are documented in bench/kernels/results.py, floors in bench/kernels/work.py.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "kernels",
        help="attention, cache writes, GEMM and a decode step against the machine's ceilings",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--minutes", type=float, help=f"time for everything (5; quick: {QUICK_MINUTES})")
    add("--quick", action="store_true", help="fewer cases and samples: done in under 45 s")
    add("--tiles", action="store_true", help="try tile shapes of the Triton kernel instead (GPU)")
    add("--only", metavar="TEXT", help="only cases whose name or kind contains this")
    add("--threads", type=int, help="cores, on a CPU (all)")
    add("--list", action="store_true", help="show cases, their work and targets; measure nothing")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if a result is wrong or a case broke, or 2 if nothing could be measured."""
    # torch is loaded here, not for other commands
    from bench.kernels.session import CEILINGS, make_bench, measure_all, pick_device

    console = Console(stderr=True)
    try:
        device = args.device if args.list and args.device != "auto" else pick_device(args.device)
        minutes = args.minutes if args.minutes is not None else QUICK_MINUTES if args.quick else 5.0
        if not minutes > 0 or (args.threads is not None and args.threads < 1):
            raise ValueError("--minutes and --threads must be positive")
        if args.tiles and device != "cuda":
            raise ValueError("--tiles: the CPU backends have no tiles to choose; it needs a CUDA device")
        plan = tile_cases() if args.tiles else cuda_cases() if device == "cuda" else cpu_cases()
        cases = chosen(plan, args.only)
    except ValueError as error:
        console.print(f"[red]bench kernels:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    if args.list:
        Console().print(case_list(cases))
        return 0
    budget = Budget(minutes * 60, time.monotonic, expected_s(device))
    bench = make_bench(device, args.threads)
    for sentence in bench.cannot():
        console.print(escape(sentence), style="yellow", highlight=False)
    start = time.monotonic()
    with console.status("ceilings"):
        ceilings = bench.measure_ceilings()
    budget.took(CEILINGS, time.monotonic() - start)
    result = KernelsResult(
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(),
        device=bench.describe(),
        ceilings=ceilings,
        cannot=bench.cannot(),
    )

    def save() -> None:  # after every case: a run that is cut off has not been for nothing
        if args.json is not None:
            result.write(args.json)

    measure_all(cases, bench, budget, result, LIMIT_S[args.quick], console, save)
    save()
    if args.plot is not None:
        from bench.kernels.plot import write_plot

        write_plot(result, args.plot)
    from bench.kernels.table import print_result

    print_result(result, Console(width=max(Console().width, 150)))
    if not result.measured:
        return 2
    broken = any(one.failed for one in result.skipped) or any(one.wrong for one in result.measured)
    return 1 if broken else 0


def expected_s(device: str) -> dict[str, float]:
    """A guess of what a case of each kind takes."""
    return {kind: seconds * (1.0 if device == "cuda" else CPU_SHARE) for kind, seconds in EXPECTED_S.items()}


def chosen(cases: list[Case], only: str | None) -> list[Case]:
    """Raises ValueError if none is left."""
    found = [case for case in cases if only is None or only in case.name or only == case.kind]
    if not found:
        raise ValueError(f"no case has {only!r} in its name; --list shows them")
    return found


def case_list(cases: list[Case]) -> Table:
    table = Table(title="Cases, the most important first")
    for name in ("case", "kind", "MB", "GFLOP", "target on an H200, µs: first / good"):
        table.add_column(name, justify="left" if name in ("case", "kind") else "right")
    for case in cases:
        target = "–" if case.target is None else f"{case.target.first_us:g} / {case.target.good_us:g}"
        table.add_row(case.name, case.kind, f"{case.work.bytes / 1e6:.1f}", f"{case.work.flops / 1e9:.2f}", target)
    return table
