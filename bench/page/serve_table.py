"""What `bench serve --json` wrote, as a table: a column for each target, and its ratios to the peers. Pure.

Peers are the targets whose names begin with `vllm` or `llama`; without one, the first target is what others are held
against. A marker's `baseline=NAME` names another, or several with commas between them.
"""

from __future__ import annotations

from typing import Any

from bench.compare import Comparison, Spread, compare, summarise
from bench.describe import describe, describe_slo
from bench.page.markdown import command, number, paragraph, source, table
from bench.stats import RunStats

LABELS = {
    "vllm": "vLLM, bfloat16",
    "bf16": "Pageplane, bfloat16",
    "int8": "Pageplane, int8",
    "pageplane": "Pageplane",
    "llama": "llama.cpp, bfloat16",
    "llamacpp": "llama.cpp, bfloat16",
    "llama.cpp": "llama.cpp, bfloat16",
}
"""What a target's name is short for; other names stand as they are."""

Rows = dict[str, tuple[str, float]]  # metric -> (label, factor)

ROWS: Rows = {
    "output_tokens_per_s": ("output tokens/s", 1.0),
    "goodput_requests_per_s": ("requests/s that meet the objectives", 1.0),
    "goodput_share": ("share that meets them, %", 100.0),
    "ttft_p50_s": ("TTFT p50, s", 1.0),
    "ttft_p99_s": ("TTFT p99, s", 1.0),
    "ttft_first_turn_p50_s": ("TTFT p50 of first turns, s", 1.0),
    "ttft_later_turns_p50_s": ("TTFT p50 of later turns, s", 1.0),
    "itl_p50_s": ("ITL p50, ms", 1e3),
    "itl_p99_s": ("ITL p99, ms", 1e3),
    "stall_max_s": ("longest stall, s", 1.0),
    "e2e_p50_s": ("end to end p50, s", 1.0),
    "e2e_p99_s": ("end to end p99, s", 1.0),
}
LONG_ARRIVALS: Rows = {
    "ttft_p50_s": ("long prompts: TTFT p50, s", 1.0),
    "ttft_p99_s": ("long prompts: TTFT p99, s", 1.0),
    "background_itl_max_over_p50": ("streams meanwhile: greatest ITL ÷ median", 1.0),
    "background_itl_p50_s": ("streams meanwhile: ITL p50, ms", 1e3),
    "background_itl_p99_s": ("streams meanwhile: ITL p99, ms", 1e3),
    "background_itl_max_s": ("streams meanwhile: greatest ITL, ms", 1e3),
    "background_quiet_itl_p50_s": ("streams at other times: ITL p50, ms", 1e3),
    "background_tokens_per_s": ("streams, over all: tokens/s", 1.0),
}


def render(result: dict[str, Any], file: str, baseline: str | None = None) -> str:
    """Caption, table and command. Raises ValueError if a baseline is no target."""
    targets: dict[str, dict[str, Any]] = {target["name"]: target for target in result["targets"]}
    baselines = _baselines(list(targets), baseline)
    order = [*baselines, *(name for name in targets if name not in baselines)]
    runs = {name: [RunStats(**run) for run in target["runs"]] for name, target in targets.items()}
    summaries = {name: summarise(runs[name]) for name in order}
    comparisons = {name: [compare(name, other, runs) for other in baselines] for name in order if name not in baselines}

    head, rows = [""], []
    for name in order:
        head += [_label(name), *(f"÷ {_label(c.baseline).partition(',')[0]}" for c in comparisons.get(name, ()))]
    kinds = LONG_ARRIVALS if result["workload"].get("kind") == "long-arrivals" else ROWS
    shown = {m: row for m, row in kinds.items() if any(summaries[name][m].median is not None for name in order)}
    for i, (metric, (label, factor)) in enumerate(shown.items()):
        row = [label]
        for name in order:
            row.append(_value(summaries[name][metric], factor, spread_too=i == 0))
            row += [_ratio(comparison, metric, bold=i == 0) for comparison in comparisons.get(name, ())]
        rows.append(row)
    rows += _startup(targets, order, comparisons) + _failed(runs, order, comparisons)
    return "\n\n".join([_caption(result, file), table(head, rows), command(result["command"])])


def _baselines(names: list[str], wanted: str | None) -> list[str]:
    if wanted is not None:
        chosen = wanted.split(",")
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"baseline {unknown[0]!r} is no target; there are {', '.join(names)}")
        return chosen
    return [name for name in names if name.startswith(("vllm", "llama"))] or names[:1]


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _caption(result: dict[str, Any], file: str) -> str:
    load = describe(result)
    count = len(result["targets"][0]["runs"])
    rounds = "One round" if count == 1 else f"{count} rounds, interleaved"
    discarded = ", after a discarded one of each" if result["targets"][0]["warmup"] is not None else ""
    slo = result.get("slo")
    objectives = [f"Objectives: {describe_slo(slo)}."] if slo else []
    spread = "Medians (least … greatest); a ratio's spread is that within a round."
    return paragraph(f"{load}. {rounds}{discarded}.", *objectives, spread, source(result, file))


def _value(spread: Spread, factor: float, *, spread_too: bool = False) -> str:
    if spread.median is None or spread.min is None or spread.max is None:
        return "–"
    if not spread_too:
        return number(spread.median * factor)
    middle, low, high = (number(value * factor, digits=4) for value in (spread.median, spread.min, spread.max))
    return f"{middle} ({low} … {high})"


def _ratio(comparison: Comparison, metric: str, *, bold: bool) -> str:
    ratio = comparison.metrics[metric]
    if ratio.ratio is None or ratio.min is None or ratio.max is None:
        return "–"
    middle = f"**{ratio.ratio:.2f}**" if bold else f"{ratio.ratio:.2f}"
    return f"{middle} ({ratio.min:.2f} … {ratio.max:.2f})"


def _startup(
    targets: dict[str, dict[str, Any]], order: list[str], comparisons: dict[str, list[Comparison]]
) -> list[list[str]]:
    took = {name: targets[name]["startup_s"] for name in order}
    if all(seconds is None for seconds in took.values()):
        return []
    row = ["start to ready, s"]
    for name in order:
        row.append(number(took[name]))
        for other in (took[comparison.baseline] for comparison in comparisons.get(name, ())):
            row.append(f"{took[name] / other:.2f}" if took[name] and other else "–")
    return [row]


def _failed(
    runs: dict[str, list[RunStats]], order: list[str], comparisons: dict[str, list[Comparison]]
) -> list[list[str]]:
    row = ["failed"]
    for name in order:
        failed = sum(run.failed for run in runs[name])
        row += [f"{failed} of {failed + sum(run.completed for run in runs[name])}"]
        row += ["" for _ in comparisons.get(name, ())]
    return [row]
