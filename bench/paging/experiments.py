"""The three experiments, in order, and what their JSON holds.

The JSON of `bench paging --json`, stable for `schema` 1 (keys may be added):
  schema, command, started_at (ISO 8601, UTC), machine (see bench/machine.py), settings
  allocators  a row for each (load, allocator): load (the distribution in words), allocator ("reserve max",
              "contiguous", "paged"), block_size (reserve: the reserved length; contiguous: slots a region grows by),
              the fields of bench.paging.replay.Replay, closed_forms {internal_waste, waste_per_request, running} with
              null where nothing simple holds, free_blocks (paged: free_slots / block_size)
  block_sizes a row for each block size: block_size, the keys of bench.paging.block_size.decode (tail_waste and
              table_length for each request, table_bytes int32, books_bytes of the scheduler's pool, plan_bytes for each
              step, step_us mean CPU time, ...) and of shared_prefix (hit_rate, hit_rate_closed_form)
  throughput  load, and rows for each (at_once, num_slots, kind): the keys of bench.paging.throughput.run, with at_once,
              requests, and gain: tokens_per_pass over that of "reserved" in the same memory. Times are passes over the
              weights of the model of a step in bench/paging/throughput.py, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.paging import block_size as engine_case
from bench.paging import throughput
from bench.paging.allocators import Allocator, Contiguous, Paged, Reserve
from bench.paging.closed_forms import (
    lifetime_lengths,
    mean_length_over_time,
    mean_tail_waste_uniform,
    requests_that_fit,
)
from bench.paging.load import Load
from bench.paging.replay import replay

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRAIN = 16
"""Slots by which a contiguous region grows: as paged blocks of 16, so that the two differ in contiguity alone."""


@dataclass(frozen=True)
class Settings:
    """How much of it is run."""

    block_sizes: tuple[int, ...] = BLOCK_SIZES
    num_slots: int = 16_384
    decode_rows: int = 256
    prefix_requests: int = 64
    memories: tuple[int, ...] = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
    at_once: int = 64
    engine_requests: int = 200
    """Of the modelled worker, at most; one at a time a fifth of them."""
    repeat: int = 3
    """Times the case of step time is run; the fastest counts: others only add to it."""

    @classmethod
    def quick(cls) -> Settings:
        return cls(
            (1, 4, 16, 64, 256),
            decode_rows=64,
            prefix_requests=32,
            memories=(4_096, 16_384, 65_536),
            engine_requests=50,
            repeat=1,
        )


Progress = Callable[[str], None]


def allocators(loads: list[Load], settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    """One trace through each allocator. Raises DoesNotFit."""
    rows = []
    for load in loads:
        choices: list[tuple[str, int, Allocator]] = [
            ("reserve max", load.longest, Reserve(settings.num_slots, load.longest)),
            ("contiguous", GRAIN, Contiguous(settings.num_slots, GRAIN)),
        ]
        choices += [("paged", size, Paged(settings.num_slots, size)) for size in settings.block_sizes]
        for name, size, allocator in choices:
            progress(f"{name}, {size}: {load.name}")
            measured = replay(load, allocator)
            row: dict[str, Any] = {"load": load.name, "allocator": name, "block_size": size, **measured.json()}
            row["closed_forms"] = _closed_forms(load, name, size, allocator.num_slots)
            if name == "paged":
                row["free_blocks"] = measured.free_slots / size
            rows.append(row)
    return rows


def _closed_forms(load: Load, name: str, size: int, num_slots: int) -> dict[str, float | None]:
    mean = mean_length_over_time(load.items)
    if name == "reserve max":
        steps, slots = lifetime_lengths(load.items)
        waste = size - mean
        return {
            "internal_waste": 1 - slots / steps / size,
            "waste_per_request": waste,
            "running": float(num_slots // size),
        }
    waste = mean_tail_waste_uniform(size)
    return {
        "internal_waste": waste / (mean + waste),
        "waste_per_request": waste,
        "running": requests_that_fit(num_slots, mean, waste) if name == "paged" else None,
    }


def block_sizes(settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    """The real engine by block size. The sizes take turns, so that a slow minute does not count against one of them."""
    rows: dict[int, dict[str, Any]] = {}
    for turn in range(settings.repeat):
        for size in settings.block_sizes:
            progress(f"engine, block size {size}, turn {turn + 1} of {settings.repeat}")
            row = {"block_size": size, **engine_case.decode(size, settings.decode_rows)}
            if size not in rows:
                rows[size] = row | engine_case.shared_prefix(size, settings.prefix_requests)
            for key in ("step_us", "step_p50_us"):
                rows[size][key] = min(rows[size][key], row[key])
    return list(rows.values())


def memories(load: Load, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Throughput against memory, many at once and one at a time."""
    longest = throughput.PREFIX_LEN + load.longest
    rows = []
    for at_once, count in ((settings.at_once, settings.engine_requests), (1, max(1, settings.engine_requests // 5))):
        part = _first(load, count)
        prompts = throughput.prompts_of(part)
        for slots in settings.memories:
            if slots < longest + throughput.BLOCK_SIZE:
                continue
            base = 0.0
            for kind in throughput.KINDS:
                progress(f"modelled worker, {slots} slots, {at_once} at once: {kind}")
                row = {
                    "at_once": at_once,
                    "requests": len(prompts),
                    **throughput.run(part, prompts, kind, slots, at_once),
                }
                base = base or row["tokens_per_pass"]
                rows.append(row | {"gain": row["tokens_per_pass"] / base})
            if at_once == 1:
                break  # more memory cannot matter to one request
    return {"load": load.name.partition(";")[0], "rows": rows}


def _first(load: Load, count: int) -> Load:
    """The first of the load, all of them waiting at the start."""
    return Load(load.name, tuple(replace(item, arrival=0) for item in load.items[:count]))
