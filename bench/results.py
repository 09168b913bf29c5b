"""The whole result of `bench serve`, and its JSON form.

Top-level keys of the JSON, stable for `schema` 1 (new keys may be added, none is renamed or changes its unit):
  schema       1
  command      the command line, one string
  started_at   ISO 8601, UTC
  machine      see bench/machine.py
  workload     {kind, …}: kind as --workload names it, and the fields of its class (bench/workload.py,
               bench/long_arrivals.py); all lengths in tokens
  concurrency  clients at a time; for long-arrivals, streams of the background
  targets      list, in the order measured within a round; each:
    name, kind, address
    startup_s  seconds from start to ready; null if the server ran already
    warmup     RunStats of the discarded run before the first round; null without one
    runs       RunStats of each round, in order
    summary    metric -> {median, min, max} over the rounds
  comparisons  the first target over each other one: {subject, baseline, metrics: metric -> {ratio, min, max, rounds}}
RunStats and the metric names: bench/stats.py. Ratios: bench/compare.py. Times are seconds, as their names say.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.compare import Comparison, Spread, compare, summarise
from bench.stats import RunStats
from bench.workload import Workload


@dataclass
class TargetResult:
    name: str
    kind: str
    address: str | None
    startup_s: float | None = None
    warmup: RunStats | None = None
    runs: list[RunStats] = field(default_factory=list)

    def summary(self) -> dict[str, Spread]:
        return summarise(self.runs)


@dataclass
class Result:
    command: str
    started_at: str
    machine: dict[str, str | int | None]
    workload: Workload
    concurrency: int
    targets: list[TargetResult]

    def comparisons(self) -> list[Comparison]:
        """The first target over each other one; empty for a single target."""
        runs = {target.name: target.runs for target in self.targets}
        subject, *others = self.targets
        return [compare(subject.name, other.name, runs) for other in others]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": self.command,
            "started_at": self.started_at,
            "machine": self.machine,
            "workload": {"kind": self.workload.kind, **asdict(self.workload)},
            "concurrency": self.concurrency,
            "targets": [
                asdict(target) | {"summary": {k: asdict(v) for k, v in target.summary().items()}}
                for target in self.targets
            ],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
