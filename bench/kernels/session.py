"""The order of things in a run: every case with every implementation, within the time, and the first once more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from rich.console import Console

from bench.kernels.budget import Budget
from bench.kernels.cases import (
    AttentionCase,
    Case,
    CopyBlocksCase,
    DecodeStepCase,
    ElementwiseCase,
    GemmCase,
    SlotMappingCase,
    WriteKVCase,
)
from bench.kernels.device import INT8, LINEAR, Bench, CannotMeasure
from bench.kernels.results import KernelsResult, Measured, Skipped

NO_TIME = "no time left"
CEILINGS = "ceilings"
"""The budget's name for measuring them once."""


def pick_device(requested: str) -> str:
    """ "cpu" or "cuda". Raises ValueError if there is none such."""
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return "cuda" if available and requested != "cpu" else "cpu"


def make_bench(device: str, threads: int | None) -> Bench:
    if device == "cuda":
        from bench.kernels.on_cuda import CudaBench

        return CudaBench()
    from bench.kernels.on_cpu import CpuBench

    return CpuBench(threads or len(os.sched_getaffinity(0)))


def backends_of(case: Case, bench: Bench) -> tuple[str, ...]:
    """With which implementations a case is measured here."""
    if case.kind == "gemm":
        return (LINEAR, INT8) if bench.device.type == "cpu" and case.dtype == "bfloat16" else (LINEAR,)
    return bench.backends[:1] if case.kind in ("decode_step", "elementwise") else bench.backends


def measure_one(case: Case, backend: str, bench: Bench, limit_s: float) -> Measured:
    """Raises CannotMeasure."""
    if isinstance(case, AttentionCase):
        from bench.kernels.attention import measure_attention

        return measure_attention(case, backend, bench, limit_s)
    if isinstance(case, WriteKVCase):
        from bench.kernels.cache_ops import measure_write_kv

        return measure_write_kv(case, backend, bench, limit_s)
    if isinstance(case, CopyBlocksCase):
        from bench.kernels.cache_ops import measure_copy_blocks

        return measure_copy_blocks(case, backend, bench, limit_s)
    if isinstance(case, SlotMappingCase):
        from bench.kernels.cache_ops import measure_slot_mapping

        return measure_slot_mapping(case, backend, bench, limit_s)
    try:
        return _measure_with_worker(case, backend, bench, limit_s)
    except ModuleNotFoundError as error:
        raise CannotMeasure(f"the worker needs {error.name}, which is not installed") from None


def _measure_with_worker(
    case: GemmCase | ElementwiseCase | DecodeStepCase, backend: str, bench: Bench, limit_s: float
) -> Measured:
    """What is the worker's, which needs more packages than the kernels do."""
    if isinstance(case, GemmCase):
        from bench.kernels.gemm import measure_gemm

        return measure_gemm(case, backend, bench, limit_s)
    if isinstance(case, ElementwiseCase):
        from bench.kernels.elementwise import measure_elementwise

        return measure_elementwise(case, backend, bench, limit_s)
    from bench.kernels.decode_step import measure_decode_step

    return measure_decode_step(case, backend, bench, 4 * limit_s)


def measure_all(
    cases: list[Case],
    bench: Bench,
    budget: Budget,
    result: KernelsResult,
    limit_s: float,
    console: Console,
    save: Callable[[], None],
) -> None:
    """Fill the result: the cases in order, first each with its main implementation, then with the others; at the end
    the first of them once more, which shows drift, and the ceilings, of which the better measurement counts."""
    again: Measured | None = None
    with console.status("") as status:
        for case, backend in in_order(cases, bench):
            reserve_s = budget.expected_s(CEILINGS)
            reserve_s += budget.expected_s(again.case.kind) if again is not None else 0.0
            if not budget.allows(case.kind, reserve_s):
                result.skipped.append(Skipped(case.name, backend, NO_TIME))
                continue
            status.update(f"{case.name} ({backend}), {budget.left_s:.0f} s left")
            start = time.monotonic()
            try:
                measured = measure_one(case, backend, bench, limit_s)
            except CannotMeasure as error:
                result.skipped.append(Skipped(case.name, backend, str(error)))
                continue
            except Exception as error:  # one broken kernel must not hide the others; the report names it
                result.skipped.append(
                    Skipped(case.name, backend, f"{type(error).__name__}: {error}"[:500], failed=True)
                )
                continue
            finally:
                bench.release()
            budget.took(case.kind, time.monotonic() - start)
            result.measured.append(measured)
            again = again or measured
            save()
        if again is not None and budget.allows(again.case.kind):
            last = measure_one(again.case, again.backend, bench, limit_s)
            result.drift = last.timing.median_us / again.timing.median_us
            bench.release()
        if budget.allows(CEILINGS):
            result.ceilings = result.ceilings.best(bench.measure_ceilings())


def in_order(cases: list[Case], bench: Bench) -> list[tuple[Case, str]]:
    """Every case with its main implementation, then every case with the others it has."""
    backends = [backends_of(case, bench) for case in cases]
    first = [(case, names[0]) for case, names in zip(cases, backends, strict=True)]
    return first + [(case, name) for case, names in zip(cases, backends, strict=True) for name in names[1:]]
