"""The real engine at one block size: tables, plans and time of steady decode, and hits on shared prefixes."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any

import numpy as np

from bench.control.driver import Driver, random_tokens
from bench.paging.closed_forms import hit_rate, mean_tail_waste_uniform
from protocol import codec
from scheduler.block_pool import BlockPool

_PERIOD = 256
"""Prompts take every rest modulo this, and this many steps are measured: each block size meets all its fillings."""


def decode(block_size: int, requests: int) -> dict[str, Any]:
    """Decode of `requests` rows, 256…511 tokens at first, for 256 steps. Times: the thread's CPU clock."""
    slots = requests * 4 * _PERIOD
    driver = Driver(
        max_num_seqs=requests,
        max_num_batched_tokens=max(8192, 512 * requests),
        num_blocks=slots // block_size + 1,
        block_size=block_size,
        max_model_len=4 * _PERIOD,
        pipeline_depth=1,
    )
    rng, rows = random.Random(1), driver.replica.rows
    lengths = [_PERIOD + i * _PERIOD // requests for i in range(requests)]
    driver.submit_all([random_tokens(rng, length) for length in lengths], 2 * _PERIOD)
    while rows.num_active < requests or (rows.planned < rows.prompt_len).any():
        driver.step()
    gc.collect()
    times, waste, plan_bytes, tables, effective, allocated = [], [], [], [], [], []
    for _ in range(_PERIOD):
        result = driver.next_result()
        before = time.thread_time()
        actions = driver.deliver(result)
        times.append(time.thread_time() - before)
        driver.take(actions)
        assert driver.plan is not None and rows.num_active == requests
        plan_bytes.append(len(codec.encode(driver.plan)))
        held, reserved = int(rows.planned.sum()), int(rows.slots.sum())
        effective.append(held)
        allocated.append(reserved)
        waste.append((reserved - held) / requests)
        tables.append(reserved / block_size / requests)
    pool = driver.replica.manager.pool
    return {
        "num_blocks": slots // block_size,
        "tail_waste": float(np.mean(waste)),
        "tail_waste_closed_form": mean_tail_waste_uniform(block_size),
        "table_length": float(np.mean(tables)),
        "table_bytes": 4 * float(np.mean(tables)),
        "books_bytes": _books_bytes(slots // block_size),
        "plan_bytes": float(np.mean(plan_bytes)),
        "step_us": 1e6 * float(np.mean(times)),
        "step_p50_us": 1e6 * float(np.median(times)),
        "effective_slots": float(np.mean(effective)),
        "allocated_slots": float(np.mean(allocated)),
        "free_blocks_at_end": pool.num_free,
        "preemptions": driver.replica.stats.preemptions,
    }


def _books_bytes(num_blocks: int) -> int:
    """What the scheduler keeps about so many blocks, none of them cached."""
    tracemalloc.start()
    pool = BlockPool(num_blocks + 1)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert pool.num_free == num_blocks
    return used


def shared_prefix(
    block_size: int, requests: int, prefixes: int = 4, prefix_len: int = 1000, unique_len: int = 60, output_len: int = 4
) -> dict[str, Any]:
    """All requests at once, with memory for all of them: which share of their prompts is found."""
    slots = requests * (prefix_len + unique_len + output_len + block_size)
    driver = Driver(
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        num_blocks=slots // block_size + 1,
        block_size=block_size,
        max_model_len=2048,
        pipeline_depth=1,
    )
    rng = random.Random(2)
    heads = [random_tokens(rng, prefix_len) for _ in range(prefixes)]
    prompts = [heads[i % prefixes] + random_tokens(rng, unique_len) for i in range(requests)]
    driver.submit_all(prompts, output_len)
    while driver.busy:
        driver.step()
    stats = driver.replica.stats
    assert len(driver.finished) == requests
    return {
        "hit_rate": stats.prefix_hits / stats.prefix_queries,
        "hit_rate_closed_form": hit_rate(requests, prefixes, prefix_len, unique_len, block_size),
    }
