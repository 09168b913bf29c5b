"""What paging buys end to end: real servers over one load, by KV memory, with memory reserved, paged, and cached.

JSON of one part, stable for `schema` 1 (keys may be added):
  experiment "memory"; command, started_at, machine (bench/machine.py); model (bench/paging/models.py); load, in words;
  prefix_len, num_prefixes, requests, longest (tokens a request holds at its end, at most), settings
  balance   tokens whose arithmetic takes as long as a step of one row, as measured here; null where it was not
  rows      one for each (at_once, num_slots, kind): max_num_seqs, fits_closed_form (requests at once, see
            bench/paging/closed_forms.py), kernel (bench/paging/observed.py:Kernel, of the warm-up, or null),
            runs (for each round the keys of RunStats and of bench/paging/observed.py:Seen),
            summary (key -> {median, min, max} over the rounds),
            gain {median, min, max}: output_tokens_per_s over that of "reserved" in the same memory and round,
            modelled_gain {accelerator, here, here_added}: the same from the model of a step in
            bench/paging/throughput.py, with its own balance, with the one measured here, and with that where arithmetic
            is added to the reading of the weights instead of hidden behind it (null where no balance was measured)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.compare import Spread
from bench.paging import throughput
from bench.paging.closed_forms import mean_length_over_time, mean_tail_waste_uniform, requests_that_fit
from bench.paging.experiments import Progress
from bench.paging.load import Load, short_chat
from bench.paging.models import ServedModel
from bench.paging.served import Served
from bench.quantiles import median
from bench.workload import Request

KINDS = throughput.KINDS
LOADS = {"shared": 128, "random": 0}
"""Tokens of a shared prefix in front of each prompt, by the load's name."""
SLOTS = {"shared": 1024, "random": 512}
"""Memory for two of the longest requests; other sizes are multiples of it."""
NUM_PREFIXES = 4
SUMMARISED = (
    "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "steps", "rows", "running",
    "effective_slots", "allocated_slots", "free_blocks", "preemptions", "hit_rate", "decode_step_ms",
    "prefill_us_per_token", "scheduler_step_us",
)  # fmt: skip


@dataclass(frozen=True)
class MemorySettings:
    """How much of it is run. The servers have launch.py's own defaults in all else."""

    memories: tuple[int, ...] = (1, 2, 8)
    """In multiples of SLOTS; in the greatest, all requests fit."""
    requests: int = 12
    rounds: int = 2
    at_once: int = 64
    block_size: int = 16
    max_num_batched_tokens: int = 512
    alone_requests: int = 2
    """Of the load that has one request at a time, in the smallest memory and, paged, in the largest."""
    profile_steps: int = 20
    kinds: tuple[str, ...] = KINDS
    seed: int = 1


@dataclass(frozen=True)
class Point:
    """One server and what is asked of it."""

    server: Served
    kind: str
    num_slots: int
    max_num_seqs: int
    at_once: int


def requests_of(load: Load, prefix_len: int, token_ids: tuple[int, int], round_index: int) -> list[Request]:
    """The load's lengths as prompts of random ids, other ones in each round, behind one of four shared prefixes."""
    rng = np.random.default_rng([5, round_index])
    heads = rng.integers(*token_ids, (NUM_PREFIXES, prefix_len)).tolist()
    return [
        Request(
            i,
            (*heads[i % NUM_PREFIXES], *rng.integers(*token_ids, item.prompt_len).tolist()),
            item.output_len,
        )
        for i, item in enumerate(load.items)
    ]


async def measure(model: ServedModel, load_name: str, settings: MemorySettings, progress: Progress) -> dict[str, Any]:
    """One part: one model, one load. Raises StartFailed, ServedFailed."""
    prefix_len = LOADS[load_name]
    load = short_chat(settings.requests, settings.seed)
    longest = prefix_len + load.longest
    rows: list[dict[str, Any]] = []
    for multiple in settings.memories:
        slots = multiple * SLOTS[load_name]
        async with AsyncExitStack() as stack:
            progress(f"{model.shape.name}, {slots:,} slots: starting {len(settings.kinds)} servers")
            limits = [throughput.rows_of(kind, slots, longest, settings.at_once) for kind in settings.kinds]
            servers = [
                Served(kind, model, settings.block_size, slots, _flags(kind, limit, longest, settings))
                for kind, limit in zip(settings.kinds, limits, strict=True)
            ]
            # all at once: on two cores, starting takes most of the time of a small model's experiment
            await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
            points = [
                Point(server, kind, slots, limit, settings.at_once)
                for server, kind, limit in zip(servers, settings.kinds, limits, strict=True)
            ]
            rows += await _rounds(points, model, load, prefix_len, settings, progress)
            alone = replace(load, items=load.items[: settings.alone_requests])
            if multiple == settings.memories[0]:
                rows += await _rounds(
                    [replace(point, at_once=1) for point in points], model, alone, prefix_len, settings, progress
                )
            elif multiple == settings.memories[-1]:
                paged = [replace(point, at_once=1) for point in points if point.kind == KINDS[1]]
                rows += await _rounds(paged, model, alone, prefix_len, settings, progress)
    for row in rows:
        part = replace(load, items=load.items[: row["requests"]])
        row["fits_closed_form"] = _fits(row, part, prefix_len, longest, settings)
    _add_gains(rows)
    balance = balance_of(rows)
    add_modelled_gains(rows, model, load, prefix_len, balance)
    return {
        "experiment": "memory",
        "model": model.json(),
        "load": f"{load.name.partition(';')[0]}; {load_name}: {prefix_len} shared tokens in front; all there at once",
        "load_name": load_name,
        "prefix_len": prefix_len,
        "num_prefixes": NUM_PREFIXES if prefix_len else 0,
        "requests": settings.requests,
        "longest": longest,
        "settings": asdict(settings),
        "balance": balance,
        "rows": rows,
    }


def _flags(kind: str, max_num_seqs: int, longest: int, settings: MemorySettings) -> list[str]:
    flags = [
        *("--max-num-seqs", str(max_num_seqs), "--max-model-len", str(longest + 2)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
    ]
    return flags if kind == KINDS[2] else [*flags, "--no-enable-prefix-caching"]


async def _rounds(
    points: Sequence[Point],
    model: ServedModel,
    load: Load,
    prefix_len: int,
    settings: MemorySettings,
    progress: Progress,
) -> list[dict[str, Any]]:
    """A warm-up of each with half the load, in part profiled, then rounds in which they take turns."""
    rows = []
    for point in points:
        progress(f"{model.shape.name}, {point.num_slots:,} slots, {point.at_once} at once: {point.kind}, warm-up")
        requests = requests_of(load, prefix_len, model.token_ids, 0)
        half = requests[: (len(requests) + 1) // 2]
        quarter = sum(request.output_len for request in half) // 4
        warm = await point.server.run(half, point.at_once, settings.profile_steps, quarter)
        rows.append(
            {
                "at_once": point.at_once,
                "num_slots": point.num_slots,
                "kind": point.kind,
                "max_num_seqs": point.max_num_seqs,
                "requests": len(requests),
                "kernel": warm["kernel"],
                "runs": [],
            }
        )
    for turn in range(1, settings.rounds + 1):
        requests = requests_of(load, prefix_len, model.token_ids, turn)
        for point, row in zip(points, rows, strict=True):
            progress(
                f"{model.shape.name}, {point.num_slots:,} slots, {point.at_once} at once: {point.kind}, "
                f"round {turn} of {settings.rounds}"
            )
            run = await point.server.run(requests, point.at_once)
            del run["kernel"]
            row["runs"].append(run)
    for row in rows:
        row["summary"] = {key: asdict(spread([run[key] for run in row["runs"]])) for key in SUMMARISED}
    return rows


def spread(values: Sequence[float | None]) -> Spread:
    """Median and extremes of those that are there."""
    there = [value for value in values if value is not None]
    return Spread(median(there), min(there, default=None), max(there, default=None))


def balance_of(rows: Sequence[dict[str, Any]]) -> float | None:
    """Tokens whose arithmetic takes as long as a decode step of one row does: medians of all runs."""
    runs = [run for row in rows for run in row["runs"]]
    step_ms = median([run["one_row_step_ms"] for run in runs])
    token_us = median([run["prefill_us_per_token"] for run in runs])
    return 1e3 * step_ms / token_us if step_ms and token_us else None


def _fits(row: dict[str, Any], load: Load, prefix_len: int, longest: int, settings: MemorySettings) -> float:
    """Requests that fit at once by closed form; with caching that without, since how much is shared varies."""
    if row["kind"] == KINDS[0]:
        fits = float(row["num_slots"] // longest)
    else:
        mean = prefix_len + mean_length_over_time(load.items)
        fits = requests_that_fit(row["num_slots"], mean, mean_tail_waste_uniform(settings.block_size))
    return min(fits, row["at_once"], row["requests"])


def _add_gains(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        base = _reserved(rows, row)
        ratios = (
            [
                run["output_tokens_per_s"] / other["output_tokens_per_s"]
                for run, other in zip(row["runs"], base["runs"], strict=True)
            ]
            if base
            else []
        )
        row["gain"] = asdict(spread(ratios))


def _reserved(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    """The row that has its memory reserved and all else in common; None: not measured."""
    for other in rows:
        if other["kind"] == KINDS[0] and all(other[key] == row[key] for key in ("at_once", "num_slots")):
            return other
    return None


def add_modelled_gains(
    rows: Sequence[dict[str, Any]], model: ServedModel, load: Load, prefix_len: int, balance: float | None
) -> None:
    per_pass = model.weight_bytes / model.slot_bytes
    models = {"accelerator": throughput.StepModel(kv_tokens_per_pass=per_pass)}
    if balance is not None:
        models["here"] = throughput.StepModel(balance, per_pass)
        models["here_added"] = throughput.StepModel(balance, per_pass, hidden=False)
    rates: dict[tuple[str, int, int, str], float] = {}
    for row in rows:
        part = replace(load, items=load.items[: row["requests"]])
        prompts = [
            np.asarray(request.prompt_token_ids, dtype="<i4").tobytes()
            for request in requests_of(part, prefix_len, model.token_ids, 1)
        ]
        for name, step_model in models.items():
            for kind in dict.fromkeys((KINDS[0], row["kind"])):
                key = (name, row["at_once"], row["num_slots"], kind)
                if key not in rates:
                    seen = throughput.run(part, prompts, kind, row["num_slots"], row["at_once"], prefix_len, step_model)
                    rates[key] = seen["tokens_per_pass"]
        row["modelled_gain"] = {
            name: rates[name, row["at_once"], row["num_slots"], row["kind"]]
            / rates[name, row["at_once"], row["num_slots"], KINDS[0]]
            for name in models
        } | ({} if balance is not None else {"here": None, "here_added": None})
