"""The cases of `bench control` for this scheduler: `python -m bench.control.ours`, asked by `conductor`.

A step is what happens between a worker's result and the next plan: the result is checked and committed, the tokens go
into messages for the clients, and a plan is made. Times are those of the thread's CPU clock, in seconds.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any

import numpy as np

from bench.control.driver import BLOCK_SIZE, CLIENT, HASH_KEY, Driver, random_tokens
from bench.control.side import Operations, median_cpu, serve
from protocol import codec
from protocol import messages as m
from scheduler import events as e
from scheduler.block_hash import root_hash
from scheduler.block_pool import BlockPool
from scheduler.request import Request

_rng = random.Random(1)
_decoding: dict[tuple[int, int, bool], Driver] = {}


def _decoding_driver(n: int, groups: int, aligned: bool) -> Driver:
    """n requests that decode, about 270 tokens long; kept for the next round of the same case."""
    key = (n, groups, aligned)
    if key not in _decoding:
        _decoding.clear()
        driver = Driver(
            max_num_seqs=n,
            max_num_batched_tokens=256 * n if aligned else max(8192, 16 * n),
            num_blocks=n * groups * 80 + 2,
            windows=(0,) if groups == 1 else (0, 256),
        )
        lengths = [256 if aligned else 256 + i % BLOCK_SIZE for i in range(n)]
        driver.submit_all([random_tokens(_rng, length) for length in lengths], 4096)
        while (
            driver.replica.rows.num_active < n
            or (driver.replica.rows.committed <= driver.replica.rows.prompt_len).any()
        ):
            driver.step()
        gc.freeze()
        _decoding[key] = driver
    return _decoding[key]


def decode(n: int, steps: int, groups: int = 1, aligned: bool = False) -> dict[str, Any]:
    """Steady decode of n requests. aligned: all cross into a new block in the same step; else 1/16 in each."""
    driver = _decoding_driver(n, groups, aligned)
    times, blocks = [], []
    for _ in range(steps):
        result = driver.next_result()
        before = time.thread_time()
        actions = driver.deliver(result)
        times.append(time.thread_time() - before)
        driver.take(actions)
        assert driver.plan is not None
        blocks.append(sum(len(ids) // 4 for ids in driver.plan.grow_ids))
    assert driver.replica.rows.num_active == n
    return {"step_s": times, "blocks": blocks, **_messages(driver)}


def _messages(driver: Driver, repeat: int = 30) -> dict[str, Any]:
    """Bytes of the latest plan, and what it costs to write and read it."""
    plan = driver.plan
    assert plan is not None
    frame = codec.encode(plan)
    encode = median_cpu(lambda: codec.encode(plan), repeat)
    decoder: codec.Decoder[m.SchedulerToWorker] = codec.Decoder(m.SchedulerToWorker)
    decode = median_cpu(lambda: decoder.decode(frame), repeat)
    return {"plan_bytes": len(frame), "encode_s": encode, "decode_s": decode}


def admission(length: int, hit: bool, count: int) -> dict[str, Any]:
    """Admitting one request of `length` tokens into an idle replica, all of it cached or nothing: hashing, lookup,
    allocation (the same three parts as in the peer); and the whole of it in the engine, from submission to plan."""
    driver = Driver(max_num_seqs=8, max_num_batched_tokens=16384)
    fixed, parts, whole = random_tokens(_rng, length), [], []
    for i in range(count + 2):
        prompt = fixed if hit else random_tokens(_rng, length)
        submit = m.Submit(f"request-{i}", prompt, m.SamplingParams(max_tokens=1, temperature=0.8, ignore_eos=True))
        before = time.thread_time()
        actions = driver.engine.handle(e.FromClient(CLIENT, submit), 0.0)
        whole.append(time.thread_time() - before)
        driver.take(actions)
        while driver.busy:
            driver.step()
        parts.append(_admission_parts(driver, fixed if hit else random_tokens(_rng, length), hit))
    return {"admit_s": parts[2:], "engine_s": whole[2:], "blocks": length // BLOCK_SIZE}


def _admission_parts(driver: Driver, prompt: bytes, hit: bool) -> float:
    manager = driver.replica.manager
    tokens = np.frombuffer(prompt, dtype=np.int32)
    request = Request("r", tokens, m.SamplingParams(), limit=99999, stop_ids=(), root=root_hash(HASH_KEY), arrival=0)
    before = time.thread_time()
    found = manager.get_computed_blocks(request)
    got = manager.allocate_slots(request, len(tokens), found)
    seconds = time.thread_time() - before
    assert got is not None and found.num_blocks == ((len(tokens) - 1) // BLOCK_SIZE if hit else 0)
    manager.free(request)
    return seconds


def shared_prefix(
    requests: int, prefixes: int, prefix_len: int, unique_len: int, output_len: int, blocks: int
) -> dict[str, Any]:
    """All requests at once, with a pool too small for them: hit rate of first admissions and cost per token."""
    driver = Driver(max_num_seqs=requests, max_num_batched_tokens=8192, num_blocks=blocks)
    heads = [random_tokens(_rng, prefix_len) for _ in range(prefixes)]
    prompts = [heads[i % prefixes] + random_tokens(_rng, unique_len) for i in range(requests)]
    before = time.thread_time()
    driver.submit_all(prompts, output_len)
    seconds = time.thread_time() - before
    while driver.busy:
        result = driver.next_result()
        before = time.thread_time()
        actions = driver.deliver(result)
        seconds += time.thread_time() - before
        driver.take(actions)
    assert len(driver.finished) == requests and driver.num_tokens == requests * output_len
    stats = driver.replica.stats
    assert driver.replica.manager.pool.num_free == blocks - 1
    return {
        "per_token_s": seconds / driver.num_tokens,
        "hit_rate": stats.prefix_hits / stats.prefix_queries,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
    }


def pool(blocks: int, count: int) -> dict[str, Any]:
    """Seconds per block of the pool's primitives, and bytes per block of its books."""
    tracemalloc.start()
    books = BlockPool(blocks)
    memory = tracemalloc.get_traced_memory()[0] / blocks
    tracemalloc.stop()
    books = BlockPool(blocks)  # not the one that was traced
    operations = Operations()
    run = operations.run
    got = run("get_new_blocks(1)", books.get_new_blocks, [1] * count)
    run("free_blocks of 1", books.free_blocks, got)
    got = run("get_new_blocks(64), per block", books.get_new_blocks, [64] * (count // 64), 64)
    run("free_blocks of 64, per block", books.free_blocks, got, 64)
    everything = books.get_new_blocks(blocks - 1)
    keys = [b"%016d\0" % i for i in range(blocks - 1)]
    run(
        "insert hash of a full block",
        lambda part: books.cache_full_blocks(*part),  # as a step does it
        [(everything[i : i + 64], keys[i : i + 64]) for i in range(0, blocks - 1, 64)],
        64,
    )
    run("free_blocks of 1, cached", books.free_blocks, [(block,) for block in everything[:count]])
    books.free_blocks(everything[count:])
    order = _rng.sample(range(count, blocks - 1), count)
    hits = run("get_cached_block, hit", books.get_cached_block, [keys[i] for i in order])
    assert all(hits)
    run("get_cached_block, miss", books.get_cached_block, [b"%016dx" % i for i in range(count)])
    run("touch, cached block in mid-queue", books.touch, [(block,) for block in hits])
    run("touch, block in use", books.touch, [(block,) for block in hits])
    books.free_blocks(hits + hits)
    run("get_new_blocks(1), evicting", books.get_new_blocks, [1] * count)
    return {"operations_s": operations.seconds, "bytes_per_block": memory}


CASES = {"decode": decode, "admission": admission, "shared_prefix": shared_prefix, "pool": pool}

if __name__ == "__main__":
    serve(CASES, {"name": "pageplane"})
