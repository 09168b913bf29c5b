"""Where in a page what a file measured is to stand. Pure: text in, text out.

A line `<!-- measured: NAME.json -->` (with `KEY=VALUE` pairs after the name, if wanted) is followed by what is made
from that file, up to `<!-- end of measured -->`. Without that end, which is then added, the line is a wish: nothing of
the page is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable

BEGIN = re.compile(r"<!-- measured: (\S+\.json)((?: [\w.]+=\S+)*) -->")
END = "<!-- end of measured -->"


def fill(page: str, render: Callable[[str, dict[str, str]], str]) -> str:
    """The page with `render(file name, options)` below each marker, in place of what is there."""
    lines = page.split("\n")
    filled: list[str] = []
    i = 0
    while i < len(lines):
        filled.append(lines[i])
        i += 1
        if match := BEGIN.fullmatch(lines[i - 1]):
            options = dict(pair.split("=", 1) for pair in match[2].split())
            filled += ["", *render(match[1], options).strip("\n").split("\n"), "", END]
            i = _after_old(lines, i)
    return "\n".join(filled)


def named(page: str) -> list[str]:
    """The file names of all markers."""
    return [match[1] for line in page.split("\n") if (match := BEGIN.fullmatch(line))]


def _after_old(lines: list[str], start: int) -> int:
    """Where the page goes on after what an earlier run made from the marker before `start`."""
    for i in range(start, len(lines)):
        if lines[i] == END:
            return i + 1
        if BEGIN.fullmatch(lines[i]):
            break
    return start
