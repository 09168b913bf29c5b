"""What `bench control --gap --json` wrote, as a table: how long a worker waits between steps. Pure."""

from __future__ import annotations

from typing import Any

from bench.page.markdown import command, number, paragraph, source, table

HEAD = ("", "gap p50, µs", "p99, µs", "share of the time", "step p50, ms", "scheduler p50, µs a step", "steps measured")


def render(result: dict[str, Any], file: str) -> str:
    """Caption, a row for each case, and command."""
    rows = [
        [
            label,
            number(case["gap_us"]["p50"]),
            number(case["gap_us"]["p99"]),
            f"{case['gap_share']:.1%}",
            number(case["work_us"]["p50"] / 1e3),
            number(case["scheduler_us"]["p50"]),
            f"{case['steps']:,}",
        ]
        for label, case in result["gaps"].items()
    ]
    return "\n\n".join([paragraph(source(result, file)), table(HEAD, rows), command(result["command"])])
