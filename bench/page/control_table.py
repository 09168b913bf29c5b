"""What `bench control --json` wrote, as a table: a row for each question, ours beside vLLM's. Pure."""

from __future__ import annotations

from typing import Any

from bench.page.markdown import command, number, paragraph, source, table

ROWS = (
    # case, metric, label
    *((f"decode, {n} running", "step_us", f"step, {n} running, µs") for n in ("64", "256", "1,024", "4,096")),
    *(
        (f"decode, {n} running, 2 groups", "step_us", f"step, {n} running, 2 cache groups, µs")
        for n in ("64", "1,024", "4,096")
    ),
    ("decode, 1,024 running", "plan_bytes", "plan, 1,024 running, bytes"),
    ("decode, 4,096 running", "plan_bytes", "plan, 4,096 running, bytes"),
    ("decode, 1,024 running", "encode_decode_us", "encode + decode of a plan, 1,024 running, µs"),
    ("admission, 1,024 tokens, none cached", "block_ns", "admission, 1,024 tokens, none cached, ns a block"),
    ("admission, 1,024 tokens, all cached", "block_ns", "admission, 1,024 tokens, all cached, ns a block"),
    ("admission, 8,192 tokens, none cached", "block_ns", "admission, 8,192 tokens, none cached, ns a block"),
    ("admission, 8,192 tokens, all cached", "block_ns", "admission, 8,192 tokens, all cached, ns a block"),
    ("shared prefixes, 512 requests", "token_us", "512 requests with 4 shared prefixes, µs a token"),
    ("shared prefixes, 512 requests", "hit_rate", "their hit rate"),
    ("block pool", "bytes_per_block", "memory of a block's books, bytes"),
)


def render(result: dict[str, Any], file: str) -> str:
    """Caption, table, how a step grows, and command. Rows that were not measured are left out."""
    sides: list[str] = result["sides"]
    labels = {side: "Pageplane" if side == "pageplane" else side for side in sides}
    rows = []
    for case, metric, label in ROWS:
        measured = result["cases"].get(case, {}).get(metric)
        if measured is None:
            continue
        row = [label]
        for side in sides:
            value = measured[side]["median"] if side in measured else None
            row.append("" if value is None else f"{value:.1%}" if metric == "hit_rate" else number(value))
        if len(sides) > 1:
            row.append(_ratio(measured.get("ratio"), metric))
        rows.append(row)
    head = ["", *labels.values(), *(["ratio (least … greatest)"] if len(sides) > 1 else [])]
    caption = paragraph(f"Medians of {result['rounds']} rounds, in turns.", source(result, file))
    return "\n\n".join(
        [caption, table(head, rows), paragraph(_growth(result["slopes"], labels)), command(result["command"])]
    )


def _ratio(ratio: dict[str, float] | None, metric: str) -> str:
    """0.66, or 1/29 where ours is much the less."""
    if ratio is None or metric == "hit_rate":
        return ""
    if ratio["ratio"] > 0.25:
        return f"{ratio['ratio']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f})"
    digits = 1 if ratio["ratio"] > 0.05 else 0
    middle, low, high = (f"1/{1 / ratio[key]:.{digits}f}" for key in ("ratio", "min", "max"))
    return f"{middle} ({low} … {high})"


def _growth(slopes: dict[str, dict[str, float] | None], labels: dict[str, str]) -> str:
    parts = []
    for side, slope in slopes.items():
        if slope is None:
            continue
        fixed = f"{number(slope['base_us'])} µs, and " if slope["base_us"] > 0 else ""
        per_block = slope["per_block_us"]
        block = f", {number(per_block)} µs for each block handed out" if per_block > 0 else ""
        parts.append(f"{labels[side]}: {fixed}{number(slope['per_row_us'])} µs for each running request{block}.")
    return " ".join(["What a step takes (a fit to all sizes of batch):", *parts]) if parts else ""
