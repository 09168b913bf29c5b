"""The experiments as tables for the terminal and as one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.paging.throughput import BLOCK_SIZE, KINDS, MAX_BATCHED_TOKENS, NUM_PREFIXES, PREFIX_LEN


def tables(result: Mapping[str, Any]) -> list[Table]:
    return [*_allocators(result), _block_sizes(result), _throughput(result)]


def _allocators(result: Mapping[str, Any]) -> Iterable[Table]:
    for load in dict.fromkeys(row["load"] for row in result["allocators"]):
        drawn = _table(
            f"Three allocators, {result['settings']['num_slots']:,} slots",
            f"{load}; a token a step, first come first served. In brackets: the closed form",
            "allocator", "B", "effective", "allocated", "free", "inside", "a request", "external", "at once",
            "preempted", "moves", "copied", "to admit",
        )  # fmt: skip
        for row in result["allocators"]:
            if row["load"] != load:
                continue
            forms = row["closed_forms"]
            drawn.add_row(
                row["allocator"],
                f"{row['block_size']:,}",
                *(f"{row[key]:,.0f}" for key in ("effective_slots", "allocated_slots", "free_slots")),
                f"{row['internal_waste']:.1%} ({forms['internal_waste']:.1%})",
                f"{row['waste_per_request']:.1f} ({forms['waste_per_request']:.1f})",
                f"{row['external_waste']:.1%}",
                f"{row['running']:.1f}" + (f" ({forms['running']:.1f})" if forms["running"] is not None else ""),
                *(f"{row[key]:,}" for key in ("preemptions", "moves", "moved_slots", "moves_to_admit")),
            )
        yield drawn


def _block_sizes(result: Mapping[str, Any]) -> Table:
    settings = result["settings"]
    drawn = _table(
        f"The real engine by block size: {settings['decode_rows']} rows decode",
        f"256…511 tokens at first, 256 steps, one step in flight, {settings['decode_rows'] * 1024:,} slots; hits: "
        f"{settings['prefix_requests']} prompts, 4 prefixes of 1,000 tokens + 60. CPU time, "
        f"best of {settings['repeat']}. In brackets: the closed form",
        "B", "effective", "allocated", "free blocks", "tail", "table entries", "table bytes", "books KiB",
        "plan bytes", "step µs", "hit rate", "preempted",
    )  # fmt: skip
    for row in result["block_sizes"]:
        drawn.add_row(
            f"{row['block_size']}",
            f"{row['effective_slots']:,.0f}",
            f"{row['allocated_slots']:,.0f}",
            f"{row['free_blocks_at_end']:,}",
            f"{row['tail_waste']:.1f} ({row['tail_waste_closed_form']:.1f})",
            f"{row['table_length']:.1f}",
            f"{row['table_bytes']:,.0f}",
            f"{row['books_bytes'] / 1024:,.0f}",
            f"{row['plan_bytes']:,.0f}",
            f"{row['step_us']:,.0f}",
            f"{row['hit_rate']:.1%} ({row['hit_rate_closed_form']:.1%})",
            f"{row['preemptions']}",
        )
    return drawn


def _throughput(result: Mapping[str, Any]) -> Table:
    counts = " and ".join(
        f"{row['requests']} ({row['at_once']} at once)"
        for row in {row["at_once"]: row for row in result["throughput"]["rows"]}.values()
    )
    drawn = _table(
        "What the room is worth, in a model of a step",
        f"{result['throughput']['load']}; all waiting at the start, {counts} requests; before "
        f"each prompt one of {NUM_PREFIXES} prefixes of {PREFIX_LEN} tokens; "
        f"B = {BLOCK_SIZE}, {MAX_BATCHED_TOKENS} tokens a step at most, one step in flight; "
        "cached: with prefix caching. 1 pass: the time to read the weights once",
        "at once", "slots", "memory is", "rows", "running", "tokens/pass", "gain", "TTFT p50", "ITL p50", "hits",
        "effective", "allocated", "free blocks", "preempted",
    )  # fmt: skip
    before = None
    for row in result["throughput"]["rows"]:
        place = (row["at_once"], row["num_slots"])
        if before not in (None, place):
            drawn.add_section()
        before = place
        drawn.add_row(
            f"{row['at_once']}",
            f"{row['num_slots']:,}",
            row["kind"],
            f"{row['max_num_seqs']}",
            f"{row['running']:.1f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['gain']:.2f} ×",
            f"{row['ttft_p50_passes']:,.0f}",
            f"{row['itl_p50_passes']:.2f}",
            f"{row['hit_rate']:.1%}",
            f"{row['effective_slots']:,.0f}",
            f"{row['allocated_slots']:,.0f}",
            f"{row['free_blocks']:,.0f}",
            f"{row['preemptions']}",
        )
    return drawn


def _table(title: str, caption: str, *columns: str) -> Table:
    drawn = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        drawn.add_column(column, justify="left" if column in ("allocator", "memory is") else "right")
    return drawn


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Six panels: waste and requests at once by allocator; waste, sizes, time and hits by block size; throughput."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    _draw_allocators(panels[0, 0], panels[0, 1], result["allocators"])
    _draw_block_sizes(panels[0, 2], panels[1, 0], panels[1, 1], result["block_sizes"])
    _draw_throughput(panels[1, 2], result["throughput"]["rows"])
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _draw_allocators(waste: Any, at_once: Any, rows: list[dict[str, Any]]) -> None:
    load = rows[0]["load"]
    mine = [row for row in rows if row["load"] == load]
    names = [
        {"reserve max": "max", "contiguous": "cont."}.get(row["allocator"], str(row["block_size"])) for row in mine
    ]
    places = list(range(len(mine)))
    shares = [
        [row["effective_slots"] / row["num_slots"] for row in mine],
        [(row["allocated_slots"] - row["effective_slots"]) / row["num_slots"] for row in mine],
        [row["external_waste"] for row in mine],
    ]
    bottom = [0.0] * len(mine)
    for label, share in zip(("holds a token", "internal waste", "external waste"), shares, strict=True):
        waste.bar(places, share, bottom=bottom, label=label)
        bottom = [b + s for b, s in zip(bottom, share, strict=True)]
    waste.set(title=f"Memory ({load.partition(':')[0]})", ylabel="share of all slots", ylim=(0, 1.15))
    waste.legend(frameon=False, ncols=3, fontsize=8, loc="upper center")
    at_once.bar(places, [row["running"] for row in mine], label="measured")
    forms = [(place, row["closed_forms"]["running"]) for place, row in zip(places, mine, strict=True)]
    known = [(place, form) for place, form in forms if form is not None]
    at_once.scatter([p for p, _ in known], [f for _, f in known], marker="_", s=150, color="black", label="closed form")
    at_once.set(
        title="Requests at once",
        ylabel="running while others wait",
        ylim=(0, 1.2 * max(row["running"] for row in mine)),
    )
    at_once.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    for axes in (waste, at_once):
        axes.set_xticks(places, names, fontsize=8)
        axes.set_xlabel("maximum reserved, contiguous, or paged by block size")
        axes.tick_params("x", length=0)


def _draw_block_sizes(tail: Any, cost: Any, hits: Any, rows: list[dict[str, Any]]) -> None:
    sizes = [row["block_size"] for row in rows]
    tail.plot(sizes, [row["tail_waste"] for row in rows], marker="o", label="tail waste, slots a request")
    tail.plot(sizes, [row["tail_waste_closed_form"] for row in rows], "k:", label="(B - 1)/2")
    tail.plot(sizes, [row["table_length"] for row in rows], marker="s", label="table entries a request")
    tail.set(title="Tail against table", xscale="log", yscale="symlog", ylim=(0, None))
    cost.plot(sizes, [row["step_us"] for row in rows], marker="o", label="scheduler step, CPU µs")
    cost.plot(sizes, [row["plan_bytes"] for row in rows], marker="s", label="plan, bytes a step")
    cost.plot(sizes, [row["books_bytes"] / 1024 for row in rows], marker="^", label="books, KiB")
    cost.set(title="What small blocks cost", xscale="log", yscale="log")
    hits.plot(sizes, [100 * row["hit_rate"] for row in rows], marker="o", label="measured")
    hits.plot(sizes, [100 * row["hit_rate_closed_form"] for row in rows], "k:", label="closed form")
    hits.set(title="Prefix hits", xscale="log", ylabel="% of prompt tokens")
    for axes in (tail, cost, hits):
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("block size B")
        axes.legend(frameon=False, fontsize=8)


def _draw_throughput(axes: Any, rows: list[dict[str, Any]]) -> None:
    for kind in KINDS:
        points = [
            (row["num_slots"], row["tokens_per_pass"]) for row in rows if row["kind"] == kind and row["at_once"] > 1
        ]
        axes.plot([slots for slots, _ in points], [rate for _, rate in points], marker="o", label=kind)
    alone = [row["tokens_per_pass"] for row in rows if row["at_once"] == 1]
    if alone:
        axes.axhline(alone[0], color="black", linestyle=":", label="one at a time, reserved or paged")
    slots = sorted({row["num_slots"] for row in rows})
    axes.set(title="Throughput in the model of a step", xscale="log", ylabel="output tokens / pass over the weights")
    axes.set_xticks(slots, [f"{n // 1024}k" for n in slots])
    axes.minorticks_off()
    axes.set_xlabel("KV memory, slots")
    axes.set_ylim(0, 1.25 * max(row["tokens_per_pass"] for row in rows))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
