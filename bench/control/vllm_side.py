"""The cases of `bench control` for vLLM V1's scheduler: run by vLLM's own Python, with a model's config.json alone.

Configured as `vllm serve` does it for a dense model on one worker: block size 16, prefix caching with SHA-256,
statistics on, the heap frozen after the start. A step is `update_from_output` of one and `schedule` of the next; a plan
is the pickled `SchedulerOutput`, as its workers get it. Times are those of the thread's CPU clock, in seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import random
import time
import uuid
import warnings
from typing import Any

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}.items():
    os.environ.setdefault(_name, _value)
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.gc_utils import freeze_gc_heap  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from bench.control.side import Operations, median_cpu, serve  # noqa: E402

BLOCK_SIZE, VOCAB = 16, 49152
_rng = random.Random(1)
_hash = get_hash_fn_by_name("sha256")
init_none_hash(_hash)
_hasher = get_request_block_hasher(BLOCK_SIZE, _hash)
_model = ""
_decoding: dict[tuple[int, int, bool], Any] = {}


def _scheduler(max_seqs: int, max_batched: int, blocks: int = 100_000, groups: int = 1) -> Any:
    length = 16384
    model = ModelConfig(
        model=_model, tokenizer=_model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length, seed=0
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    scheduling = SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_batched,
        max_model_len=length,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling)
    cache.num_gpu_blocks = blocks
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    specs = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if groups == 2:
        specs.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=256)))
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=specs),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    freeze_gc_heap()
    return scheduler


def _tokens(count: int) -> list[int]:
    return [_rng.randrange(VOCAB) for _ in range(count)]


def _request(prompt: list[int], max_tokens: int, hasher: Any = _hasher) -> Any:
    return Request(
        request_id=f"cmpl-{uuid.uuid4().hex[:16]}-0-{uuid.uuid4().hex[:8]}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8),
        pooling_params=None,
        block_hasher=hasher,
    )


def _result(scheduler: Any, plan: Any) -> Any:
    ids = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: i for i, request in enumerate(ids)},
        sampled_token_ids=[
            [] if scheduler.requests[request].is_prefill_chunk else [_rng.randrange(VOCAB)] for request in ids
        ],
    )


def decode(n: int, steps: int, groups: int = 1, aligned: bool = False) -> dict[str, Any]:
    key = (n, groups, aligned)
    if key not in _decoding:
        _decoding.clear()
        scheduler = _scheduler(n, 256 * n if aligned else max(8192, 16 * n), n * groups * 80 + 2, groups)
        for i in range(n):
            scheduler.add_request(_request(_tokens(256 if aligned else 256 + i % BLOCK_SIZE), 4096))
        while len(scheduler.running) < n or any(r.num_output_tokens < 1 for r in scheduler.running):
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, _result(scheduler, plan))
        _decoding[key] = (scheduler, scheduler.schedule())
    scheduler, plan = _decoding[key]
    times, blocks = [], []
    for _ in range(steps):
        result = _result(scheduler, plan)
        before = time.thread_time()
        scheduler.update_from_output(plan, result)
        plan = scheduler.schedule()
        times.append(time.thread_time() - before)
        assert plan.total_num_scheduled_tokens == n
        new = plan.scheduled_cached_reqs.new_block_ids
        blocks.append(sum(len(ids) for groups_ids in new if groups_ids for ids in groups_ids))
    _decoding[key] = (scheduler, plan)
    frame = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
    return {
        "step_s": times,
        "blocks": blocks,
        "plan_bytes": len(frame),
        "encode_s": median_cpu(lambda: pickle.dumps(plan, pickle.HIGHEST_PROTOCOL), 30),
        "decode_s": median_cpu(lambda: pickle.loads(frame), 30),
    }


def admission(length: int, hit: bool, count: int) -> dict[str, Any]:
    scheduler = _scheduler(8, 16384)
    manager, fixed, times = scheduler.kv_cache_manager, _tokens(length), []
    for _ in range(count + 2):
        request = _request(fixed if hit else _tokens(length), 16, None)
        request._block_hasher = _hasher
        before = time.thread_time()
        request.update_block_hashes()
        blocks, computed, *_ = manager.get_computed_blocks(request)
        got = manager.allocate_slots(
            request,
            request.num_tokens - computed,
            num_new_computed_tokens=computed,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
            has_scheduled_reqs=False,
        )
        times.append(time.thread_time() - before)
        assert got is not None
        manager.free(request)
    return {"admit_s": times[2:], "blocks": length // BLOCK_SIZE}


def shared_prefix(
    requests: int, prefixes: int, prefix_len: int, unique_len: int, output_len: int, blocks: int
) -> dict[str, Any]:
    scheduler = _scheduler(requests, 8192, blocks)
    heads = [_tokens(prefix_len) for _ in range(prefixes)]
    all_requests = [_request(heads[i % prefixes] + _tokens(unique_len), output_len) for i in range(requests)]
    before = time.thread_time()
    for request in all_requests:
        scheduler.add_request(request)
    seconds, steps, generated, hits, queries = time.thread_time() - before, 0, 0, 0, 0
    while scheduler.has_unfinished_requests():
        before = time.thread_time()
        plan = scheduler.schedule()
        seconds += time.thread_time() - before
        result = _result(scheduler, plan)
        before = time.thread_time()
        outputs = scheduler.update_from_output(plan, result)
        seconds += time.thread_time() - before
        steps += 1
        for output in outputs.values():
            generated += sum(len(each.new_token_ids) for each in output.outputs)
            stats = output.scheduler_stats and output.scheduler_stats.prefix_cache_stats
            if stats:
                hits, queries = hits + stats.hits, queries + stats.queries
    assert generated == requests * output_len
    return {
        "per_token_s": seconds / generated,
        "hit_rate": hits / queries,
        "preemptions": sum(request.num_preemptions for request in all_requests),
        "steps": steps,
    }


def pool(blocks: int, count: int) -> dict[str, Any]:
    books = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)

    operations = Operations()
    run = operations.run
    got = run("get_new_blocks(1)", books.get_new_blocks, [1] * count)
    run("free_blocks of 1", books.free_blocks, got)
    got = run("get_new_blocks(64), per block", books.get_new_blocks, [64] * (count // 64), 64)
    run("free_blocks of 64, per block", books.free_blocks, got, 64)
    everything = books.get_new_blocks(blocks - 1)
    hashes = [_hash((i, "x")) for i in range(blocks - 1)]
    run(
        "insert hash of a full block",
        lambda pair: books._insert_block_hash(make_block_hash_with_group_id(pair[0], 0), pair[1], BLOCK_SIZE),
        list(zip(hashes, everything, strict=True)),
    )
    run("free_blocks of 1, cached", books.free_blocks, [(block,) for block in everything[:count]])
    books.free_blocks(everything[count:])
    order = _rng.sample(range(count, blocks - 1), count)
    hits = run("get_cached_block, hit", lambda h: books.get_cached_block(h, [0]), [hashes[i] for i in order])
    assert all(hits)
    misses = [_hash((i, "y")) for i in range(count)]
    run("get_cached_block, miss", lambda h: books.get_cached_block(h, [0]), misses)
    run("touch, cached block in mid-queue", books.touch, hits)
    run("touch, block in use", books.touch, hits)
    books.free_blocks([block[0] for block in hits + hits])
    run("get_new_blocks(1), evicting", books.get_new_blocks, [1] * count)
    return {"operations_s": operations.seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    _model = parser.parse_args().model
    cases = {"decode": decode, "admission": admission, "shared_prefix": shared_prefix, "pool": pool}
    serve(cases, {"name": f"vLLM {vllm.__version__}"})
    os._exit(0)  # its libraries end noisily
