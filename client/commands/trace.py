"""`python -m client trace`: what a running server does, into a file for Perfetto."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from client.aio import AsyncClient
from client.commands.options import parser
from client.trace_file import TraceFile


def main(arguments: list[str]) -> int:
    """Take a trace; return the exit code."""
    command = parser(
        " trace", "Record what a running server does; open the file in https://ui.perfetto.dev. Ctrl-C ends it early."
    )
    command.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long (default: 5, at most 600)")
    command.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="trace.json")
    options = command.parse_args(arguments)
    try:
        asyncio.run(_record(options))
    except KeyboardInterrupt:
        print(f"cut short; what was recorded is in {options.output}", file=sys.stderr)
    return 0


async def _record(options: argparse.Namespace) -> None:
    async with AsyncClient(options.endpoint) as client:
        await client.server_info()  # a server that is not there is reported before a file is made
        with TraceFile(open(options.output, "wb")) as file:
            async for events in client.trace(options.seconds):
                file.write(events)
    print(f"{file.events} events in {options.output}", file=sys.stderr)
