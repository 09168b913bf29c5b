"""A result as a table for the terminal."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.compare import Ratio, Spread
from bench.describe import describe, describe_slo
from bench.results import Result
from bench.stats import HIGHER_IS_BETTER

# metric -> (label, factor, format)
ROWS = {
    "output_tokens_per_s": ("output tokens/s", 1.0, "{:.1f}"),
    "requests_per_s": ("requests/s", 1.0, "{:.2f}"),
    "goodput_requests_per_s": ("requests/s that meet the SLO", 1.0, "{:.2f}"),
    "goodput_share": ("share that meets it, %", 100.0, "{:.1f}"),
    "ttft_p50_s": ("TTFT p50, ms", 1e3, "{:.0f}"),
    "ttft_p90_s": ("TTFT p90, ms", 1e3, "{:.0f}"),
    "ttft_p99_s": ("TTFT p99, ms", 1e3, "{:.0f}"),
    "itl_p50_s": ("ITL p50, ms", 1e3, "{:.1f}"),
    "itl_p90_s": ("ITL p90, ms", 1e3, "{:.1f}"),
    "itl_p99_s": ("ITL p99, ms", 1e3, "{:.1f}"),
    "ttft_first_turn_p50_s": ("TTFT p50 of first turns, ms", 1e3, "{:.0f}"),
    "ttft_later_turns_p50_s": ("TTFT p50 of later turns, ms", 1e3, "{:.0f}"),
    "background_itl_p50_s": ("streams beside them: ITL p50, ms", 1e3, "{:.1f}"),
    "background_itl_p99_s": ("… ITL p99, ms", 1e3, "{:.1f}"),
    "background_itl_max_s": ("… greatest ITL, ms", 1e3, "{:.1f}"),
    "background_itl_max_over_p50": ("… greatest ÷ p50", 1.0, "{:.2f}"),
    "background_quiet_itl_p50_s": ("… ITL p50 in quiet times, ms", 1e3, "{:.1f}"),
    "background_tokens_per_s": ("… tokens/s", 1.0, "{:.1f}"),
    "stall_max_s": ("longest stall, ms", 1e3, "{:.0f}"),
    "e2e_p50_s": ("end to end p50, s", 1.0, "{:.2f}"),
    "e2e_p90_s": ("end to end p90, s", 1.0, "{:.2f}"),
    "e2e_p99_s": ("end to end p99, s", 1.0, "{:.2f}"),
}


def format_spread(spread: Spread, factor: float, form: str) -> str:
    """`median (min…max)`, or a dash where there is no value."""
    if spread.median is None or spread.min is None or spread.max is None:
        return "–"
    low, mid, high = (form.format(value * factor) for value in (spread.min, spread.median, spread.max))
    return f"{mid} ({low}…{high})"


def format_ratio(ratio: Ratio) -> str:
    if ratio.ratio is None or ratio.min is None or ratio.max is None:
        return "–"
    return f"{ratio.ratio:.2f} ({ratio.min:.2f}…{ratio.max:.2f})"


def result_table(result: Result) -> Table:
    """A row per metric, a column per target, a column per comparison."""
    slo = f"; SLO: {describe_slo(asdict(result.slo))}" if result.slo is not None else ""
    rounds = len(result.targets[0].runs)
    comparisons = result.comparisons()
    table = Table(
        title=describe(result.as_json()),
        caption=f"median (least…greatest) of {rounds} interleaved rounds; machine: {result.machine['cpu']}, "
        f"{result.machine['cores']} cores{slo}",
    )
    table.add_column("")
    for target in result.targets:
        table.add_column(target.name, justify="right")
    for comparison in comparisons:
        table.add_column(f"{comparison.subject} ÷ {comparison.baseline}", justify="right", style="bold")
    summaries = [target.summary() for target in result.targets]
    for metric, (label, factor, form) in ROWS.items():
        if all(summary[metric].median is None for summary in summaries):
            continue  # of another kind of load
        wish = "↑" if metric in HIGHER_IS_BETTER else "↓"
        cells = [format_spread(summary[metric], factor, form) for summary in summaries]
        table.add_row(f"{label} {wish}", *cells, *(format_ratio(c.metrics[metric]) for c in comparisons))
    failed = [
        f"{sum(r.failed for r in t.runs)} of {sum(r.failed + r.completed for r in t.runs)}" for t in result.targets
    ]
    table.add_row("failed requests", *failed, *("" for _ in comparisons))
    return table


def print_result(result: Result, console: Console) -> None:
    console.print(result_table(result))
    for target in result.targets:
        for run in target.runs:
            for reason, count in run.errors.items():
                console.print(
                    f"[red]{target.name}: {count} failed:[/] {escape(reason)}", highlight=False, soft_wrap=True
                )
