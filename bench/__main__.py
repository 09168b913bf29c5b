"""`python -m bench COMMAND`: measurements, of running servers of kernels and of the scheduler."""

from __future__ import annotations

import argparse
import signal
import sys

from bench import perplexity, serve
from bench.control import command as control
from bench.gpu import command as gpu
from bench.kernels import command as kernels
from bench.page import command as page
from bench.paging import command as paging


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve.add_parser(subcommands)
    kernels.add_parser(subcommands)
    control.add_parser(subcommands)
    paging.add_parser(subcommands)
    perplexity.add_parser(subcommands)
    gpu.add_parser(subcommands)
    page.add_parser(subcommands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: servers that were started are stopped
    sys.exit(main())
