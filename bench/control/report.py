"""The summary as a table for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def table(summary: Mapping[str, Any], sides: Sequence[str], caption: str) -> Table:
    """A row for each metric of each case."""
    drawn = Table(title="The control plane alone, CPU time", caption=caption, title_justify="left")
    drawn.add_column("case")
    drawn.add_column("metric")
    for side in sides:
        drawn.add_column(side, justify="right")
    if len(sides) == 2:
        drawn.add_column("ratio", justify="right", style="bold")
    for label, rows in summary.items():
        for i, (metric, row) in enumerate(rows.items()):
            cells = [_number(row[side]["median"]) if side in row else "–" for side in sides]
            if len(sides) == 2:
                ratio = row.get("ratio")
                cells.append(_ratio(ratio) if ratio else "")
            drawn.add_row(label if i == 0 else "", metric, *cells)
        drawn.add_section()
    return drawn


def gap_table(gaps: Mapping[str, Any], caption: str) -> Table:
    """What `bench control --gap` measured: a row for each case."""
    drawn = Table(title="Between two steps of a worker", caption=caption, title_justify="left")
    drawn.add_column("case")
    for heading in ("steps", "gap p50", "p99", "max, µs", "its share", "step, ms", "scheduler, µs a step"):
        drawn.add_column(heading, justify="right")
    for label, row in gaps.items():
        gap = [_number(row["gap_us"][each]) for each in ("p50", "p99", "max")]
        step, scheduler = row["work_us"]["p50"] / 1e3, row["scheduler_us"]["p50"]
        share = f"{row['gap_share']:.2%}"
        drawn.add_row(label, f"{row['steps']:,}", *gap, share, _number(step), _number(scheduler))
    return drawn


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(ratio: Mapping[str, float]) -> str:
    middle = ratio["ratio"]
    if 0 < middle < 0.2:
        return f"1/{1 / middle:.1f} (1/{1 / ratio['min']:.1f}…1/{1 / ratio['max']:.1f})"
    return f"{middle:.2f} ({ratio['min']:.2f}…{ratio['max']:.2f})"


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Left: a step over the batch. Right: what a row and what a block handed out add to it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for side in result["sides"]:
        points = sorted(
            (arguments["n"], result["cases"][label]["step_us"][side]["median"])
            for label, arguments in result["decode_cases"].items()
            if arguments.get("groups", 1) == 1 and not arguments.get("aligned") and label in result["cases"]
        )
        left.loglog([n for n, _ in points], [us for _, us in points], marker="o", label=side)
    left.set_xlabel("requests that decode (1 of 16 opens a block)")
    left.set_ylabel("µs a step")
    left.legend(frameon=False)
    found = {side: slope for side, slope in result["slopes"].items() if slope}
    width = 0.8 / max(1, len(found))
    for i, (side, slope) in enumerate(found.items()):
        heights = [slope["per_row_us"], slope["per_block_us"]]
        places = [x - 0.4 + width * (i + 0.5) for x in range(2)]
        right.bar(places, heights, width, label=side)
        for x, height in zip(places, heights, strict=True):
            right.annotate(f"{height:.3g}", (x, height), ha="center", va="bottom", fontsize=9)
    right.set_xticks([0, 1], ["for each running request", "for each block handed out"])
    right.set_ylabel("µs added to a step")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
