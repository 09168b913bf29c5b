"""What tables of all measurements have in common: cells, captions, commands. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH = 130  # of lines of text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of rows that have as many cells as the head."""
    lines = (f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in (head, *rows))
    first, *others = lines
    return "\n".join([first, "|" + "---|" * len(head), *others])


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, digits: int = 3) -> str:
    """So many digits, or all those before the point; a dash for None."""
    if value is None:
        return "–"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}" if value else "0"


def source(result: dict[str, Any], file: str) -> str:
    """Machine, day, commit, and where the numbers lie."""
    machine = result["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {result['started_at'][:10]}, commit "
        f"`{machine['commit']}`; raw: [{file}](measurements/{file})."
    )


def command(line: str) -> str:
    """A command as it was given, foldable, over several lines."""
    flags: list[str] = []  # each with its values; what comes before the first one counts as one
    for word in shlex.split(line):
        if flags and not word.startswith("--"):
            flags[-1] += f" {shlex.quote(word)}"
        else:
            flags.append(shlex.quote(word))
    lines = flags[:1]
    for flag in flags[1:]:
        if len(lines[-1]) + len(flag) < WIDTH - 4:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    text = " \\\n  ".join(lines)
    return f"<details><summary>the command</summary>\n\n```\n{text}\n```\n\n</details>"
