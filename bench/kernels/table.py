"""The result of a run for the terminal: every figure beside its floor, its target and torch's attention."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.kernels.results import KernelsResult, Measured
from bench.kernels.work import Ceilings


def micros(value: float | None) -> str:
    """Three digits that matter; a dash for what is not there."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f}%"


def row(one: Measured, ceilings: Ceilings) -> list[str]:
    timing, target = one.timing, one.case.target
    spread = f"{micros(timing.min_us)}…{micros(timing.max_us)}"
    baseline = "–"
    if one.baseline is not None:
        ratio = one.baseline.timing.median_us / timing.median_us
        baseline = f"{micros(one.baseline.timing.median_us)} ({ratio:.2f}x)"
    error = "–" if one.relative_error is None else f"{one.relative_error:.1e}"
    return [
        one.case.name,
        one.backend,
        micros(ceilings.floor_us(one.case.work)),
        f"{micros(timing.median_us)} ({spread})",
        percent(one.share_of_floor(ceilings)),
        "–" if target is None else f"{micros(target.first_us)} / {micros(target.good_us)}",
        baseline,
        f"[red]{error} WRONG[/]" if one.wrong else error,
    ]


def result_table(result: KernelsResult) -> Table:
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in result.ceilings.matmul_flops_per_s.items())
    samples = sorted({one.timing.samples for one in result.measured})
    counts = "–" if not samples else str(samples[0]) if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    table = Table(
        title=f"Kernels on {result.device['name']}",
        caption=f"ceilings: copy {result.ceilings.copy_bytes_per_s / 1e9:,.4g} GB/s, {rates}; µs, median of {counts} "
        "samples (least…greatest); targets are for an H200",
    )
    for name in ("case", "backend"):
        table.add_column(name, overflow="fold")
    for name in ("floor", "measured", "of floor", "target: first / good", "torch (ours is faster)", "error"):
        table.add_column(name, justify="right")
    for one in result.measured:
        table.add_row(*row(one, result.ceilings))
    return table


def print_result(result: KernelsResult, console: Console) -> None:
    console.print(result_table(result))
    for one in result.measured:
        if one.parts_us is not None:
            parts = ", ".join(f"{name} {micros(value)}" for name, value in one.parts_us.items())
            console.print(f"{one.case.name}: {parts} µs", highlight=False, markup=False)
    if result.drift is not None:
        console.print(f"the first case again, last: {result.drift:.2f} of its first time", highlight=False)
    for reason, names in skipped_by_reason(result).items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        console.print(f"[yellow]left out, {escape(reason)}:[/] {escape(shown)}", highlight=False, soft_wrap=True)


def skipped_by_reason(result: KernelsResult) -> dict[str, list[str]]:
    """Reason → what was left out for it, in order."""
    found: dict[str, list[str]] = {}
    for one in result.skipped:
        found.setdefault(one.reason, []).append(f"{one.name} ({one.backend})")
    return found
