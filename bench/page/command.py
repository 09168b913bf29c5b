"""`python -m bench page`: fill the tables in docs/ from the files in docs/measurements/.

A line `<!-- measured: NAME.json -->` in a page stands for what docs/measurements/NAME.json says, written by
`bench serve --json` or `bench control --json`; this command puts it below that line, again after each change of either.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.page import control_table, gap_table, serve_table
from bench.page.markers import fill, named

DOCS = Path(__file__).resolve().parents[2] / "docs"


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "page",
        help="fill the tables in docs/ from docs/measurements/",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="the pages (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 if --check finds a page that differs from its files, 2 if a file can't be shown."""
    console = Console(stderr=True)
    stale = False
    for page in sorted(args.docs.glob("*.md")):
        old = page.read_text()
        if not named(old):
            continue
        try:
            new = fill(old, lambda name, options: render(args.docs / "measurements" / name, options))
        except ValueError as error:
            console.print(f"{page}: {error}", highlight=False, markup=False, soft_wrap=True)
            return 2
        if new == old:
            continue
        if args.check:
            stale = True
            console.print(f"{page} differs from its files: run `python -m bench page`", markup=False, soft_wrap=True)
        else:
            page.write_text(new)
            console.print(f"{page} filled", markup=False, soft_wrap=True)
    return 1 if stale else 0


def render(file: Path, options: dict[str, str]) -> str:
    """What a page shows of a file. Raises ValueError, naming it."""
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        if "targets" in result:
            return serve_table.render(result, file.name, **options)
        if "cases" in result and "sides" in result:
            return control_table.render(result, file.name, **options)
        if "gaps" in result:
            return gap_table.render(result, file.name, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name}: {type(error).__name__}: {error}") from error
    raise ValueError(f"{file.name} was written neither by `bench serve` nor by `bench control`")
