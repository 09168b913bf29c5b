"""Writes into the paged cache measured: the K and V of a step, and whole blocks."""

from __future__ import annotations

import torch

from bench.kernels.backends import load
from bench.kernels.cases import CopyBlocksCase, WriteKVCase
from bench.kernels.device import DTYPES, Bench, CannotMeasure
from bench.kernels.results import Measured


def measure_write_kv(case: WriteKVCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Slots scattered over a pool four times as large as what is written. Raises CannotMeasure."""
    if case.kv_dtype != case.dtype:
        raise CannotMeasure(f"no cache of {case.kv_dtype} for {case.dtype}")
    backend, heads, dtype = load(backend_name, bench.num_threads), case.heads, DTYPES[case.dtype]
    num_blocks = -(-4 * case.num_tokens // case.block_size) + 1
    pool = (num_blocks, heads.num_kv, case.block_size, heads.head_dim)
    num_sets, cold = bench.num_sets(case.work.bytes)
    calls = []
    for seed in range(num_sets):
        fused = torch.randn(  # as a layer makes them: cut out of one projection
            (case.num_tokens, heads.num_q + 2 * heads.num_kv, heads.head_dim), device=bench.device, dtype=dtype
        )
        k, v = fused[:, heads.num_q : heads.num_q + heads.num_kv], fused[:, heads.num_q + heads.num_kv :]
        k_cache, v_cache = (torch.zeros(pool, device=bench.device, dtype=dtype) for _ in range(2))
        places = torch.randperm((num_blocks - 1) * case.block_size, generator=torch.Generator().manual_seed(seed))
        slots = (places[: case.num_tokens] + case.block_size).to(bench.device)

        def call(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots) -> None:
            backend.write_kv(k, v, k_cache, v_cache, slots)

        calls.append(call)
    return Measured(case, backend_name, bench.time(calls, cold=cold, limit_s=limit_s))


def measure_copy_blocks(case: CopyBlocksCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Sources and targets scattered over the pool."""
    backend, heads, dtype = load(backend_name, bench.num_threads), case.heads, DTYPES[case.dtype]
    pool = (2 * case.num_blocks + 1, heads.num_kv, case.block_size, heads.head_dim)
    num_sets, cold = bench.num_sets(case.work.bytes)
    calls = []
    for seed in range(num_sets):
        caches = [torch.zeros(pool, device=bench.device, dtype=dtype) for _ in range(2 * case.num_layers)]
        ids = torch.randperm(2 * case.num_blocks, generator=torch.Generator().manual_seed(seed)) + 1
        src, dst = (part.to(bench.device) for part in ids.split(case.num_blocks))

        def call(caches=caches, src=src, dst=dst) -> None:
            backend.copy_blocks(caches, src, dst)

        calls.append(call)
    return Measured(case, backend_name, bench.time(calls, cold=cold, limit_s=limit_s))
