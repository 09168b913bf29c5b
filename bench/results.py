"""The whole result of `bench serve`, and its JSON form.

The keys are listed in docs/benchmarks.md, a line each, and stay for `schema` 1: new ones may be added, none is renamed
or changes its unit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.compare import Comparison, Spread, compare, summarise
from bench.load import Load
from bench.slo import Slo
from bench.stats import RunStats


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
    load: Load
    targets: list[TargetResult]
    slo: Slo | None = None

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
            "workload": self.load.workload.as_json(),
            "arrivals": self.load.arrivals_as_json(),
            "concurrency": self.load.concurrency,
            "slo": None if self.slo is None else asdict(self.slo),
            "targets": [
                asdict(target) | {"summary": {k: asdict(v) for k, v in target.summary().items()}}
                for target in self.targets
            ],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
