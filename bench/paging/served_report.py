"""The experiments with real servers as tables for the terminal and as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.paging.memory import KINDS

Part = Mapping[str, Any]
MODELLED = {"accelerator": "modelled, accelerator", "here_added": "modelled, this machine"}


def tables(parts: Iterable[Part]) -> list[Table]:
    drawn: list[Table] = []
    for part in parts:
        drawn += _memory(part) if part["experiment"] == "memory" else _blocks(part)
    return drawn


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _middle(row: Mapping[str, Any], key: str, form: str, factor: float = 1.0) -> str:
    """The median over the rounds."""
    return _number(row["summary"][key]["median"], form, factor)


def _range(spread: Mapping[str, float | None], form: str, factor: float = 1.0) -> str:
    """`median (least…greatest)`; the median alone where they do not differ as printed."""
    low, middle, high = (_number(spread[key], form, factor) for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low}…{high})"


def _kernel(row: Mapping[str, Any]) -> str:
    kernel = row["kernel"]
    return "–" if kernel is None else f"{kernel['us_per_step'] / 1e3:.2f} ({kernel['share']:.0%})"


def _memory(part: Part) -> list[Table]:
    """Speed, and what is in the memory meanwhile."""
    model, settings = part["model"], part["settings"]
    speed = _table(
        f"What paging buys end to end: {model['name']}, {model['weights']} weights, {model['dtype']}",
        f"{part['load']}; {settings['rounds']} rounds. One worker, B = {settings['block_size']}, "
        f"{settings['max_num_batched_tokens']} tokens a step at most. Medians, in brackets least and greatest round. "
        "Gain: over reserved, same memory and round; modelled for an accelerator, and with the balance measured here, "
        f"{_number(part['balance'], '.0f')} tokens. Attention: all layers, ms a step and share of it, profiled",
        "at once", "slots", "memory is", "tokens/s", "gain", "acc.", "here", "added", "TTFT p50 s", "ITL p50 ms",
        "decode step ms", "attention ms",
    )  # fmt: skip
    books = _table(
        "The memory meanwhile",
        f"{part['load']}. Means over looks at the running server; fits: requests at once by closed form",
        "at once", "slots", "memory is", "rows", "fits", "running", "hits", "effective", "allocated", "free blocks",
        "preempted",
    )  # fmt: skip
    before = None
    for row in part["rows"]:
        place = (row["at_once"], row["num_slots"])
        if before not in (None, place):
            speed.add_section()
            books.add_section()
        before = place
        names = [f"{row['at_once']}", f"{row['num_slots']:,}", row["kind"]]
        speed.add_row(
            *names,
            _range(row["summary"]["output_tokens_per_s"], ",.0f"),
            _range(row["gain"], ".2f"),
            *(_number(row["modelled_gain"][name], ".2f") for name in ("accelerator", "here", "here_added")),
            _range(row["summary"]["ttft_p50_s"], ".2f"),
            _range(row["summary"]["itl_p50_s"], ".1f", 1e3),
            _middle(row, "decode_step_ms", ".1f"),
            _kernel(row),
        )
        books.add_row(
            *names,
            f"{row['max_num_seqs']}",
            f"{row['fits_closed_form']:.1f}",
            _middle(row, "running", ".1f"),
            _middle(row, "hit_rate", ".0%"),
            _middle(row, "effective_slots", ",.0f"),
            _middle(row, "allocated_slots", ",.0f"),
            _middle(row, "free_blocks", ",.0f"),
            _middle(row, "preemptions", ".0f"),
        )
    return [speed, books]


def _blocks(part: Part) -> list[Table]:
    """Time, and everything that is counted."""
    model, settings = part["model"], part["settings"]
    where = f"One worker, {settings['slots']:,} slots, {settings['max_num_batched_tokens']} tokens a step at most"
    time = _table(
        f"Block size in real servers: {model['name']}, {model['weights']} weights, {model['dtype']}",
        f"{part['load']}; {settings['rounds']} rounds. {where}. Step: the worker's work; medians, in brackets least "
        "and greatest round. Attention: all layers, ms a step and share of it, profiled",
        "B", "decode step ms", "attention ms", "prefill µs/token", "attention ms", "tokens/s", "ITL p50 ms",
        "TTFT p50 s of hits", "scheduler µs a step",
    )  # fmt: skip
    counted = _table(
        "What is counted",
        f"Of the decode load; hits: of theirs. {where}. In brackets: the closed form",
        "B", "effective", "allocated", "free blocks", "tail", "plan bytes", "hits", "preempted",
    )  # fmt: skip
    for row in part["rows"]:
        decode, prefill, hits, forms = row["decode"], row["prefill"], row["hits"], row["closed_forms"]
        time.add_row(
            f"{row['block_size']}",
            _range(decode["summary"]["decode_step_ms"], ".1f"),
            _kernel(decode),
            _range(prefill["summary"]["prefill_us_per_token"], ".0f"),
            _kernel(prefill),
            _range(decode["summary"]["output_tokens_per_s"], ",.0f"),
            _middle(decode, "itl_p50_s", ".1f", 1e3),
            _range(hits["summary"]["ttft_p50_s"], ".2f"),
            _middle(decode, "scheduler_step_us", ".0f"),
        )
        counted.add_row(
            f"{row['block_size']}",
            _middle(decode, "effective_slots", ",.0f"),
            _middle(decode, "allocated_slots", ",.0f"),
            _middle(decode, "free_blocks", ",.0f"),
            f"{_number(row['tail_waste'], '.1f')} ({forms['tail_waste']:.1f})",
            f"{_middle(decode, 'decode_plan_bytes', '.0f')} ({forms['plan_bytes']:.0f})",
            f"{_middle(hits, 'hit_rate', '.1%')} ({forms['hit_rate']:.1%})",
            _middle(decode, "preemptions", ".0f"),
        )
    return [time, counted]


def _table(title: str, caption: str, *columns: str) -> Table:
    drawn = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        drawn.add_column(column, justify="left" if column == "memory is" else "right")
    return drawn


def write_plot(parts: Sequence[Part], path: Path) -> None:
    """A row of panels for each part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.6 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(parts), 4, squeeze=False)
    for line, part in zip(panels, parts, strict=True):
        (_draw_memory if part["experiment"] == "memory" else _draw_blocks)(line, part)
        for axes in line:
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _draw_memory(line: Sequence[Any], part: Part) -> None:
    """Throughput, gain, TTFT and requests that run, by KV memory."""
    rate, gain, ttft, running = line
    many = [row for row in part["rows"] if row["at_once"] > 1]
    slots = sorted({row["num_slots"] for row in many})
    for i, kind in enumerate(dict.fromkeys(row["kind"] for row in many)):
        rows = [row for row in many if row["kind"] == kind]
        places, color = [row["num_slots"] for row in rows], f"C{KINDS.index(kind)}"
        for axes, key in ((rate, "output_tokens_per_s"), (ttft, "ttft_p50_s")):
            _with_whiskers(axes, places, [row["summary"][key] for row in rows], color, kind)
        running.plot(places, [row["summary"]["running"]["median"] for row in rows], marker="o", color=color)
        if kind != KINDS[2]:
            label = "closed form" if i == 0 else None
            running.plot(places, [row["fits_closed_form"] for row in rows], color=color, linestyle=":", label=label)
        if kind != KINDS[0]:
            _with_whiskers(gain, places, [row["gain"] for row in rows], color, f"{kind}, measured")
            for name, style in (("accelerator", ":"), ("here_added", "--")):
                modelled = [row["modelled_gain"][name] for row in rows]
                if None not in modelled:
                    gain.plot(places, modelled, linestyle=style, color=color, label=MODELLED[name])
    alone = [row for row in part["rows"] if row["at_once"] == 1]
    if alone:
        values = [row["summary"]["output_tokens_per_s"]["median"] for row in alone]
        rate.axhspan(min(values), max(values), color="black", alpha=0.25, lw=1, label="one at a time, all of them")
    name = f"{part['model']['name']}, {part['load_name']}"
    rate.set(title=f"{name}: output tokens/s")
    gain.set(title="gain over reserved", ylim=(0, None))
    ttft.set(title="TTFT p50, s")
    running.set(title="requests in the batch, mean")
    for axes in line:
        axes.set(xscale="log", xlabel="KV memory, slots")
        axes.set_ylim(0, None)
        axes.set_xticks(slots, [f"{n:,}" for n in slots])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7)


def _draw_blocks(line: Sequence[Any], part: Part) -> None:
    """Steps, attention, tail and hits by block size."""
    steps, kernels, tail, hits = line
    rows = part["rows"]
    sizes = [row["block_size"] for row in rows]
    decode = [row["decode"]["summary"]["decode_step_ms"] for row in rows]
    prefill = [row["prefill"]["summary"]["prefill_us_per_token"] for row in rows]
    _with_whiskers(steps, sizes, decode, "C0", "decode step, ms")
    _with_whiskers(steps, sizes, prefill, "C1", "prefill, µs a token")
    steps.set(title=f"{part['model']['name']}: steps", yscale="log")
    for color, name in (("C0", "decode"), ("C1", "prefill")):
        known = [(row["block_size"], row[name]["kernel"]) for row in rows if row[name]["kernel"]]
        ms = [kernel["us_per_step"] / 1e3 for _, kernel in known]
        kernels.plot([size for size, _ in known], ms, marker="o", color=color, label=f"{name}, all layers")
    kernels.set(title="Attention, ms a step (profiled)", yscale="log")
    tail.plot(sizes, [row["tail_waste"] for row in rows], marker="o", label="tail waste, slots a request")
    tail.plot(sizes, [row["closed_forms"]["tail_waste"] for row in rows], "k:", label="(B - 1)/2")
    plans = [row["decode"]["summary"]["decode_plan_bytes"]["median"] for row in rows]
    tail.plot(sizes, plans, marker="s", label="plan, bytes a step")
    tail.plot(sizes, [row["closed_forms"]["plan_bytes"] for row in rows], "k--", label="40 + 8 · rows/B")
    tail.set(title="Tail and plans", yscale="symlog", ylim=(0, None))
    rates = [100 * row["hits"]["summary"]["hit_rate"]["median"] for row in rows]
    hits.plot(sizes, rates, marker="o", label="hits, % of prompt tokens")
    hits.plot(sizes, [100 * row["closed_forms"]["hit_rate"] for row in rows], "k:", label="closed form")
    hits.set(title="Prefix hits", ylim=(0, 100))
    for axes in line:
        axes.set(xscale="log", xlabel="block size B")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7)


def _with_whiskers(axes: Any, places: Sequence[int], spreads: Sequence[Any], color: str, label: str) -> None:
    """Medians as a line, the extremes of the rounds as whiskers."""
    middle = [spread["median"] for spread in spreads]
    low = [spread["median"] - spread["min"] for spread in spreads]
    high = [spread["max"] - spread["median"] for spread in spreads]
    axes.errorbar(places, middle, yerr=[low, high], marker="o", capsize=3, color=color, label=label)
