"""All numbers of a `bench kernels` run, and their JSON form. Pure.

Top-level keys, stable for `schema` 1 (new keys may be added, none is renamed or changes its unit):
  schema, command, started_at, machine   as in bench/results.py
  device     type (cpu, cuda), name; threads, load_1m of a CPU; multiprocessors, l2_bytes, memory_bytes,
             driver_version … of a GPU; torch, triton: versions
  ceilings   copy_bytes_per_s; matmul_flops_per_s: dtype → rate; the better of before and after
  cases      list, in the order measured; each:
    name, kind, backend
    shape            the fields of the case (bench/kernels/cases.py); lengths of many sequences as [length, count] runs
    bytes, flops     what it must move and calculate (bench/kernels/work.py)
    floor_us         microseconds at the ceilings; null if no rate of its dtype was measured
    bound_by         "memory" or "compute": what makes the floor
    timing           bench/kernels/timing.py
    share_of_floor   floor_us / timing.median_us: 1 is as fast as the machine allows
    baseline         {name, timing}: the same result another way (torch's SDPA on dense K and V); null without one
    relative_error   of the result: ‖ours - baseline‖ / ‖baseline‖; null without one
    target_us        {first_us, good_us} for an H200; null without one
    parts_us         of a decode step: its parts as the worker times them, medians; else null
  skipped    list of {name, backend, reason, failed}: what this run left out; failed: it was tried and broke
  cannot     sentences: what this machine cannot show at all, or not now
  drift      last over first median of the case that is measured twice; null if the time did not suffice
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.kernels.cases import Case
from bench.kernels.timing import Timing
from bench.kernels.work import Ceilings

MAX_ERROR = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}
"""Relative error beyond which a result is wrong, by dtype: of bfloat16 an honest one has some 2e-3."""


@dataclass(frozen=True)
class Baseline:
    name: str
    timing: Timing


@dataclass(frozen=True)
class Measured:
    """What was measured of one case with one backend."""

    case: Case
    backend: str
    timing: Timing
    baseline: Baseline | None = None
    relative_error: float | None = None
    parts_us: dict[str, float] | None = None

    @property
    def wrong(self) -> bool:
        """The time of a wrong result is worth nothing. NaN is wrong, too."""
        return self.relative_error is not None and not self.relative_error <= MAX_ERROR[self.case.dtype]

    def share_of_floor(self, ceilings: Ceilings) -> float | None:
        floor = ceilings.floor_us(self.case.work)
        return None if floor is None else floor / self.timing.median_us

    def as_json(self, ceilings: Ceilings) -> dict[str, Any]:
        work = self.case.work
        compute = ceilings.compute_us(work)
        return {
            "name": self.case.name,
            "kind": self.case.kind,
            "backend": self.backend,
            "shape": shape_of(self.case),
            "bytes": work.bytes,
            "flops": work.flops,
            "floor_us": ceilings.floor_us(work),
            "bound_by": None if compute is None else "compute" if compute > ceilings.memory_us(work) else "memory",
            "timing": asdict(self.timing),
            "share_of_floor": self.share_of_floor(ceilings),
            "baseline": None if self.baseline is None else asdict(self.baseline),
            "relative_error": self.relative_error,
            "target_us": None if self.case.target is None else asdict(self.case.target),
            "parts_us": self.parts_us,
        }


@dataclass(frozen=True)
class Skipped:
    name: str
    backend: str
    reason: str
    failed: bool = False


@dataclass
class KernelsResult:
    command: str
    started_at: str
    machine: dict[str, str | int | None]
    device: dict[str, str | int | None]
    ceilings: Ceilings
    measured: list[Measured] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    cannot: list[str] = field(default_factory=list)
    drift: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": self.command,
            "started_at": self.started_at,
            "machine": self.machine,
            "device": self.device,
            "ceilings": asdict(self.ceilings),
            "cases": [one.as_json(self.ceilings) for one in self.measured],
            "skipped": [asdict(one) for one in self.skipped],
            "cannot": self.cannot,
            "drift": self.drift,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")


def shape_of(case: Case) -> dict[str, Any]:
    """The fields that say what was computed; long tuples of equal lengths in short."""
    shape: dict[str, Any] = {}
    for each in fields(case):
        value = getattr(case, each.name)
        if each.name in ("name", "target"):
            continue
        shape[each.name] = runs_of(value) if isinstance(value, tuple) else _plain(value)
    return shape


def runs_of(lengths: Sequence[int]) -> list[list[int]]:
    """[5, 1, 1, 1] → [[5, 1], [1, 3]]: each length, and how often it comes in a row."""
    return [[length, len(list(group))] for length, group in itertools.groupby(lengths)]


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
