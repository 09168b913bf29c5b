"""`python -m client profile`: which kernels the steps of a worker spend their time in."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from client.commands.options import parser
from client.errors import ClientError
from client.sync import Client
from protocol.messages import ProfileReport


def main(arguments: list[str]) -> int:
    """Take a profile and print it; return the exit code."""
    command = parser(
        " profile",
        "Have torch.profiler look at the next steps of a worker, and print the share of each kernel. Something must be "
        "asked of the server meanwhile. Steps are slower while they are profiled.",
    )
    command.add_argument("--replica", type=int, default=0, metavar="N", help="whose worker (default: 0)")
    command.add_argument(
        "--steps", type=int, default=20, metavar="N", help="how many steps (default: 20, at most 1000)"
    )
    command.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="report what has run by then (default: 30)"
    )
    command.add_argument("--rows", type=int, default=20, metavar="N", help="lines of the table (default: 20)")
    options = command.parse_args(arguments)
    with Client(options.endpoint) as client:
        report = client.profile(options.replica, steps=options.steps, seconds=options.seconds)
    if not report.profile.steps:
        raise ClientError(f"no step ran within {options.seconds:g} s: ask something of the server meanwhile")
    if report.profile.steps < options.steps:
        print(f"only {report.profile.steps} steps ran within {options.seconds:g} s", file=sys.stderr)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table(report, options.rows))
    return 0


def table(report: ProfileReport, rows: int) -> Table:
    """The most expensive kernels, with their share of the time of all."""
    profile = report.profile
    total = sum(kernel.self_us for kernel in profile.kernels) or 1
    per_step = profile.wall_us / profile.steps / 1e3
    found = Table(
        title=f"{report.worker_id}, {profile.steps} steps of {per_step:,.2f} ms, {profile.device} time",
        title_justify="left",
    )
    for heading in ("share", "ms a step", "calls a step"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("kernel", overflow="fold")
    for kernel in profile.kernels[:rows]:
        found.add_row(
            f"{kernel.self_us / total:.1%}",
            f"{kernel.self_us / profile.steps / 1e3:,.3f}",
            f"{kernel.calls / profile.steps:,.1f}",
            kernel.name,
        )
    rest = profile.kernels[rows:]
    if rest:
        us, calls = sum(kernel.self_us for kernel in rest), sum(kernel.calls for kernel in rest)
        per = f"{us / profile.steps / 1e3:,.3f}", f"{calls / profile.steps:,.1f}"
        found.add_row(f"{us / total:.1%}", *per, f"{len(rest)} others")
    return found
