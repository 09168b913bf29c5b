"""What more requests at once are worth: the real engine over a *modelled* worker, whose clock is virtual.

The model of a step, in passes over the weights (1: the time to read them once):

    step = max(1, tokens computed / BALANCE) + KV tokens read / KV_TOKENS_PER_PASS

a roofline of the weights' bytes against arithmetic, and the keys and values that each running row reads once. Nothing
else costs time: no scheduler, no launch, no sampling. So ratios between rows of one table mean something, and seconds
are not claimed. BALANCE is arithmetic over bandwidth of an accelerator in tokens; KV_TOKENS_PER_PASS is the default
model's: 269 MB of bfloat16 weights over 23,040 bytes a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.control.driver import CLIENT, Driver
from bench.paging.load import Load
from protocol import messages as m
from scheduler import events as e

BALANCE = 256
KV_TOKENS_PER_PASS = 269_000_000 / 23_040
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 512
PREFIX_LEN, NUM_PREFIXES = 256, 4

KINDS = ("reserved", "paged", "paged, cached")


@dataclass(frozen=True)
class StepModel:
    """balance: tokens whose arithmetic takes as long as reading the weights once. kv_tokens_per_pass: tokens whose keys
    and values take as long to read. hidden: whether arithmetic goes on while weights are read, so that the longer of
    both counts (a roofline), or comes on top of it."""

    balance: float = BALANCE
    kv_tokens_per_pass: float = KV_TOKENS_PER_PASS
    hidden: bool = True

    def passes(self, tokens: int, kv_tokens: int) -> float:
        """What a step costs, in passes over the weights (with the arithmetic of one token)."""
        weights = max(1.0, tokens / self.balance) if self.hidden else 1 + (tokens - 1) / self.balance
        return weights + kv_tokens / self.kv_tokens_per_pass


ACCELERATOR = StepModel()


def prompts_of(load: Load, seed: int = 3) -> list[bytes]:
    """Each prompt begins with one of four shared prefixes of 256 tokens, which its own length comes on top of."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(2, 49_000, (NUM_PREFIXES, PREFIX_LEN), dtype=np.int32)
    return [
        heads[i % NUM_PREFIXES].tobytes() + rng.integers(2, 49_000, item.prompt_len, dtype=np.int32).tobytes()
        for i, item in enumerate(load.items)
    ]


def rows_of(kind: str, slots: int, longest: int, at_once: int) -> int:
    """Rows that may run: "reserved" as many as regions of the longest request go into the memory."""
    return max(1, min(at_once, slots // longest)) if kind == "reserved" else at_once


def run(
    load: Load,
    prompts: list[bytes],
    kind: str,
    slots: int,
    at_once: int,
    prefix_len: int = PREFIX_LEN,
    step_model: StepModel = ACCELERATOR,
) -> dict[str, Any]:
    """The whole load, there at the start, in `slots` of KV memory and at most `at_once` rows.

    "reserved" runs the same engine with only as many rows as `rows_of` says. prefix_len: tokens of each prompt that its
    length in `load` does not count.
    """
    longest = prefix_len + load.longest
    rows = rows_of(kind, slots, longest, at_once)
    driver = Driver(
        max_num_seqs=rows,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        num_blocks=slots // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        max_model_len=longest + 2,
        pipeline_depth=1,
        enable_prefix_caching=kind == KINDS[2],
    )
    submits: list[e.Event] = [
        e.FromClient(
            CLIENT,
            m.Submit(f"r{i}", prompt, m.SamplingParams(max_tokens=item.output_len, temperature=0.8, ignore_eos=True)),
        )
        for i, (prompt, item) in enumerate(zip(prompts, load.items, strict=True))
    ]
    driver.take(driver.engine.handle_all(submits, 0.0))
    state, pool = driver.replica.rows, driver.replica.manager.pool
    now, first, last, gaps = 0.0, dict[int, float](), dict[int, float](), list[float]()
    running, effective, allocated, free, kv_passes = [], [], [], [], 0.0
    while driver.busy:
        kv_tokens = int(state.planned.sum())
        now += step_model.passes(driver.replica.in_flight[0].num_tokens, kv_tokens)
        kv_passes += kv_tokens / step_model.kv_tokens_per_pass
        running.append(state.num_active)
        effective.append(kv_tokens)
        allocated.append((pool.num_usable - pool.num_free) * BLOCK_SIZE)
        free.append(pool.num_free)
        actions = driver.deliver(driver.next_result())
        driver.take(actions)
        for action in actions:
            if isinstance(action, e.ToClient) and isinstance(action.message, m.TokenBatch):
                for handle in np.frombuffer(action.message.handles, dtype=np.int32).tolist():
                    if handle in last:
                        gaps.append(now - last[handle])
                    first.setdefault(handle, now)
                    last[handle] = now
    assert len(driver.finished) == len(load.items) and all(each.reason == "length" for each in driver.finished)
    stats = driver.replica.stats
    return {
        "kind": kind,
        "num_slots": slots,
        "max_num_seqs": rows,
        "tokens_per_pass": driver.num_tokens / now,
        "passes": now,
        "steps": len(running),
        "running": float(np.mean(running)),
        "ttft_p50_passes": float(np.median(list(first.values()))),
        "itl_p50_passes": float(np.median(gaps)) if gaps else 0.0,
        "kv_read_share": kv_passes / now,
        "hit_rate": stats.prefix_hits / stats.prefix_queries,
        "effective_slots": float(np.mean(effective)),
        "allocated_slots": float(np.mean(allocated)),
        "free_blocks": float(np.mean(free)),
        "preemptions": stats.preemptions,
    }
