"""What became of the steps of a run on a GPU: `summary.json`, and a table last.

Keys of the JSON, stable for `schema` 1:
  schema, command, started_at, machine   as in bench/results.py
  minutes       time that the run was given
  environment   bench/gpu/environment.py
  steps         list: name, argv, limit_s, seconds, code (null: ended at its limit, or left out), left_out (why, or
                null), log (file in the same folder), tests ({passed, failed, skipped} or null)
  ok            whether every step ran and ended with code 0
The numbers themselves are in kernels.json beside it (bench/kernels/results.py).
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

LAST_LINES = 90
"""Of a log that are shown."""


@dataclass(frozen=True)
class StepReport:
    name: str
    argv: list[str]
    limit_s: float
    seconds: float
    code: int | None
    left_out: str | None
    log: str
    tests: dict[str, int] | None = None

    @property
    def ok(self) -> bool:
        return self.left_out is None and self.code == 0

    @property
    def verdict(self) -> str:
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        if self.code is None:
            return "ended at its limit"
        return "ok" if self.code == 0 else f"exit code {self.code}"


@dataclass
class GpuReport:
    command: str
    started_at: str
    machine: dict[str, str | int | None]
    minutes: float
    environment: dict[str, Any]
    steps: list[StepReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": 1, **asdict(self), "ok": self.ok}, indent=1) + "\n")


def count_tests(junit: Path) -> dict[str, int] | None:
    """Counts of a JUnit file; None if there is none that can be read."""
    try:
        suites = list(ET.parse(junit).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return None
    total, failed, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def print_report(report: GpuReport, out: Path, console: Console) -> None:
    """The ends of the logs of what went wrong, all of the timings, and the table last."""
    for step in report.steps:
        log = out / step.log
        if step.left_out is None and log.exists() and (not step.ok or step.name in ("kernels", "tiles")):
            lines = log.read_text(errors="replace").splitlines()
            console.rule(step.name)
            console.print("\n".join(lines[-LAST_LINES:]), markup=False, highlight=False, soft_wrap=True)
    table = Table(title=f"GPU run of {report.minutes:g} minutes; files in {out}")
    for name in ("step", "result", "tests", "s", "limit, s"):
        table.add_column(name, justify="left" if name in ("step", "result") else "right")
    for step in report.steps:
        tests = "–" if step.tests is None else f"{step.tests['passed']} passed, {step.tests['failed']} failed"
        colour = "green" if step.ok else "red"
        table.add_row(
            step.name, f"[{colour}]{escape(step.verdict)}[/]", tests, f"{step.seconds:.0f}", f"{step.limit_s:.0f}"
        )
    console.print(table)
