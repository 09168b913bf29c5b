"""Block size in real servers: steps of decode and of prefill, the attention kernel in them, plans, hits, tails.

Three loads for each block size, by servers that are all there and take turns:
  decode   ROWS requests at once, prompts of 128…248 tokens, 64 tokens each: lengths at many rests modulo B
  prefill  prompts of 512 tokens, one token each: every step computes 512 tokens of a prompt
  hits     four prefixes of 200 tokens, 20 of their own behind each, all at once

JSON of one part, stable for `schema` 1 (keys may be added):
  experiment "blocks"; command, started_at, machine; model; load, in words; settings
  rows  one for each block_size:
        decode, prefill, hits   each {runs, summary, kernel} as in bench/paging/memory.py; kernel null for hits
        tail_waste              allocated less effective slots for each running request (decode; means over looks)
        closed_forms            tail_waste (B-1)/2; hit_rate (bench/paging/closed_forms.py); plan_bytes:
                                EMPTY_PLAN_BYTES and 8 for each block handed out, rows / B of them in a step
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.paging.closed_forms import hit_rate, mean_tail_waste_uniform
from bench.paging.experiments import Progress
from bench.paging.memory import SUMMARISED, spread
from bench.paging.models import ServedModel
from bench.paging.served import Served
from bench.workload import Request

EMPTY_PLAN_BYTES = 40
"""Of a plan that changes nothing (docs/wire.md)."""
BYTES_A_BLOCK = 8
"""Its row and its id."""
ROWS = 16
DECODE_STEPS = 64
PREFIX_LEN, OWN_LEN, NUM_PREFIXES = 200, 20, 4
KEYS = (*SUMMARISED, "decode_plan_bytes")


@dataclass(frozen=True)
class BlockSettings:
    """How much of it is run. The servers have launch.py's own defaults in all else."""

    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    rounds: int = 2
    slots: int = 8192
    max_num_batched_tokens: int = 512
    prefill_requests: int = 6
    profile_steps: int = 20
    seed: int = 1


def loads_of(settings: BlockSettings, token_ids: tuple[int, int], round_index: int) -> dict[str, list[Request]]:
    """The requests of a round by load, with other ids in each round."""
    rng = np.random.default_rng([settings.seed, round_index])

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(*token_ids, count).tolist())

    heads = [ids(PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    budget = settings.max_num_batched_tokens
    return {
        "decode": [Request(i, ids(128 + 8 * i), DECODE_STEPS) for i in range(ROWS)],
        "prefill": [Request(i, ids(budget), 1) for i in range(settings.prefill_requests)],
        "hits": [Request(i, heads[i % NUM_PREFIXES] + ids(OWN_LEN), 2) for i in range(ROWS)],
    }


async def measure(model: ServedModel, settings: BlockSettings, progress: Progress) -> dict[str, Any]:
    """One part: one model, all block sizes. Raises StartFailed, ServedFailed."""
    flags = [
        *("--max-num-seqs", str(ROWS), "--max-model-len", "1024"),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
    ]
    servers = [Served(f"B = {size}", model, size, settings.slots, flags) for size in settings.block_sizes]
    async with AsyncExitStack() as stack:
        for server in servers:
            progress(f"{model.shape.name}: starting the server with {server.name}")
            await stack.enter_async_context(server)
        rows: list[dict[str, Any]] = [{"block_size": server.block_size} for server in servers]
        for turn in range(settings.rounds + 1):
            loads = loads_of(settings, model.token_ids, turn)
            # there and back again: what drifts in one direction falls on all sizes alike
            order = list(zip(servers, rows, strict=True))[:: 1 if turn % 2 else -1]
            for server, row in order:
                progress(f"{model.shape.name}, {server.name}: {f'round {turn}' if turn else 'warm-up'}")
                for name, requests in loads.items():
                    await _run(server, row, name, requests, turn, settings)
    for row in rows:
        for name in ("decode", "prefill", "hits"):
            row[name]["summary"] = {key: asdict(spread([run[key] for run in row[name]["runs"]])) for key in KEYS}
        row["tail_waste"] = tail_waste(row["decode"]["runs"])
        row["closed_forms"] = closed_forms(row["block_size"])
    return {
        "experiment": "blocks",
        "model": model.json(),
        "load_name": "blocks",
        "load": f"decode: {ROWS} at once, 128…{128 + 8 * (ROWS - 1)} tokens in, {DECODE_STEPS} out; prefill: "
        f"{settings.prefill_requests} × {settings.max_num_batched_tokens} in, 1 out; hits: {ROWS} at once, "
        f"{NUM_PREFIXES} prefixes of {PREFIX_LEN} + {OWN_LEN}",
        "settings": asdict(settings),
        "rows": rows,
    }


async def _run(
    server: Served, row: dict[str, Any], name: str, requests: Sequence[Request], turn: int, settings: BlockSettings
) -> None:
    """Turn 0 is the warm-up: it is profiled, decode once all prompts are computed, and not counted."""
    if turn == 0:
        steps, after = {
            "decode": (settings.profile_steps, 4 * len(requests)),
            "prefill": (max(1, settings.prefill_requests - 2), 0),
        }.get(name, (0, 0))
        if not steps:
            row[name] = {"kernel": None, "runs": []}
            return
        warm = await server.run(requests, len(requests), steps, after)
        row[name] = {"kernel": warm["kernel"], "runs": []}
        return
    run = await server.run(requests, len(requests))
    del run["kernel"]
    row[name]["runs"].append(run)


def tail_waste(runs: Sequence[dict[str, Any]]) -> float | None:
    """Slots for each running request, of a load that shares nothing: (allocated - effective) / running."""
    return spread(
        [
            (run["allocated_slots"] - run["effective_slots"]) / run["running"]
            for run in runs
            if run["running"] is not None
        ]
    ).median


def closed_forms(block_size: int) -> dict[str, float]:
    return {
        "tail_waste": mean_tail_waste_uniform(block_size),
        "hit_rate": hit_rate(ROWS, NUM_PREFIXES, PREFIX_LEN, OWN_LEN, block_size),
        "plan_bytes": EMPTY_PLAN_BYTES + BYTES_A_BLOCK * ROWS / block_size,
    }
