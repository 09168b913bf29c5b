"""A result as a picture: throughput and latencies of all targets side by side (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

from bench.describe import describe
from bench.results import Result

Panel = tuple[str, float, dict[str, str]]  # title, factor of the values, label -> metric

THROUGHPUT: Panel = ("Output tokens/s", 1.0, {"": "output_tokens_per_s"})
GOODPUT: Panel = ("Requests/s within the SLO", 1.0, {"": "goodput_requests_per_s"})
TTFT: Panel = ("Time to first token, s", 1.0, {"p50": "ttft_p50_s", "p90": "ttft_p90_s", "p99": "ttft_p99_s"})
TURNS: Panel = (
    "Time to first token by turn, s",
    1.0,
    {
        "first, p50": "ttft_first_turn_p50_s",
        "later, p50": "ttft_later_turns_p50_s",
        "all, p99": "ttft_p99_s",
    },
)
ITL: Panel = ("Inter-token latency, ms", 1e3, {"p50": "itl_p50_s", "p90": "itl_p90_s", "p99": "itl_p99_s"})
GREATEST_ITL: Panel = ("Greatest ITL ÷ median", 1.0, {"": "background_itl_max_over_p50"})
BACKGROUND_ITL: Panel = (
    "Streams beside them: inter-token latency, ms",
    1e3,
    {
        "quiet p50": "background_quiet_itl_p50_s",
        "p50": "background_itl_p50_s",
        "p99": "background_itl_p99_s",
        "max": "background_itl_max_s",
    },
)


def panels_of(result: Result) -> list[Panel]:
    """What is worth seeing of this kind of load."""
    if result.load.workload.kind == "long-arrivals":
        return [GREATEST_ITL, TTFT, BACKGROUND_ITL]
    goodput = [] if result.slo is None else [GOODPUT]
    return [THROUGHPUT, *goodput, TURNS if result.load.workload.kind == "multi-turn" else TTFT, ITL]


def write_plot(result: Result, path: Path) -> None:
    """Bars are medians over the rounds, whiskers their extremes. The format follows the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(result)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), width_ratios=[1 if len(metrics) == 1 else 2 for _, _, metrics in panels])
    width = 0.8 / len(result.targets)
    for ax, (title, factor, metrics) in zip(axes, panels, strict=True):
        for i, target in enumerate(result.targets):
            summary = target.summary()
            spreads = [summary[metric] for metric in metrics.values()]
            middle = [(s.median or 0.0) * factor for s in spreads]
            low = [m - (s.min or 0.0) * factor for m, s in zip(middle, spreads, strict=True)]
            high = [(s.max or 0.0) * factor - m for m, s in zip(middle, spreads, strict=True)]
            places = [x - 0.4 + width * (i + 0.5) for x in range(len(metrics))]
            ax.bar(places, middle, width, yerr=[low, high], capsize=3, label=target.name)
        ax.set_title(title, fontsize=10)
        ax.set_xticks(range(len(metrics)), list(metrics))
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(bottom=0)
        if len(metrics) == 1:
            ax.set_xlim(-0.6, 0.6)
    axes[-1].legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"{describe(result.as_json())} ({result.machine['cpu']}, {result.machine['cores']} cores)", fontsize=10
    )
    figure.savefig(path, dpi=150)
