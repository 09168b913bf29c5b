"""A result as a picture: how much of what the machine allows each case reaches (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

from bench.kernels.results import KernelsResult


def write_plot(result: KernelsResult, path: Path) -> None:
    """A bar a case, ours and torch's; the line at 1 is the floor. The format follows the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(one, floor) for one in result.measured if (floor := result.ceilings.floor_us(one.case.work)) is not None]
    figure = Figure(figsize=(10, 1.2 + 0.34 * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh(places, [floor / one.timing.median_us for one, floor in shown], 0.5, label="ours")
    beside = [
        (place, floor / one.baseline.timing.median_us)
        for place, (one, floor) in enumerate(shown)
        if one.baseline is not None
    ]
    axes.scatter([share for _, share in beside], [place for place, _ in beside], color="black", zorder=3, label="torch")
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(list(places), [f"{one.case.name} ({one.backend})" for one, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("floor / measured time")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.suptitle(str(result.device["name"]), fontsize=10)
    figure.savefig(path, dpi=150)
