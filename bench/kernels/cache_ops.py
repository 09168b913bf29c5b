"""Writes into the paged cache measured: the K and V of a step, whole blocks, and where the tokens go."""

from __future__ import annotations

import torch

from bench.kernels.backends import backend_for, load, scale_for
from bench.kernels.cases import CopyBlocksCase, SlotMappingCase, WriteKVCase
from bench.kernels.device import DTYPES, Bench, CannotMeasure
from bench.kernels.results import Measured


def measure_write_kv(case: WriteKVCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Slots scattered over a pool four times as large as what is written. Raises CannotMeasure."""
    backend, heads, dtype = backend_for(backend_name, case, bench), case.heads, DTYPES[case.dtype]
    scale = scale_for(case.kv_dtype, heads.num_kv, bench.device)
    num_blocks = -(-4 * case.num_tokens // case.block_size) + 1
    pool = (num_blocks, heads.num_kv, case.block_size, heads.head_dim)
    num_sets, cold = bench.num_sets(case.work.bytes)
    calls = []
    for seed in range(num_sets):
        fused = torch.randn(  # as a layer makes them: cut out of one projection
            (case.num_tokens, heads.num_q + 2 * heads.num_kv, heads.head_dim), device=bench.device, dtype=dtype
        )
        k, v = fused[:, heads.num_q : heads.num_q + heads.num_kv], fused[:, heads.num_q + heads.num_kv :]
        k_cache, v_cache = (torch.zeros(pool, device=bench.device, dtype=DTYPES[case.kv_dtype]) for _ in range(2))
        places = torch.randperm((num_blocks - 1) * case.block_size, generator=torch.Generator().manual_seed(seed))
        slots = (places[: case.num_tokens] + case.block_size).to(bench.device)

        def call(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots) -> None:
            backend.write_kv(k, v, k_cache, v_cache, slots, scale, scale)

        calls.append(call)
    return Measured(case, backend_name, bench.time(calls, cold=cold, limit_s=limit_s))


def measure_slot_mapping(case: SlotMappingCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Tables and step at fixed addresses, as a recorded step has them. Raises CannotMeasure."""
    if bench.device.type != "cuda":
        raise CannotMeasure("on a CPU slots are worked out with numpy, as part of the batch")
    from kernels.triton.slots import SlotMapper

    width = -(-max(case.seq_lens) // case.block_size)
    num_seqs, num_sets = len(case.seq_lens), 2
    calls = []
    for seed in range(num_sets):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(1, 1 << 20, (num_seqs, width), dtype=torch.int32, generator=generator)
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(torch.tensor(case.query_lens), 0)
        mapper = SlotMapper([table.to(bench.device)], [case.block_size])
        rows = torch.randperm(num_seqs, generator=generator).to(bench.device)
        query_start_loc = starts.to(bench.device)
        seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=bench.device)
        slots = torch.zeros((1, sum(case.query_lens)), dtype=torch.int64, device=bench.device)

        def call(mapper=mapper, rows=rows, starts=query_start_loc, seq_lens=seq_lens, slots=slots) -> None:
            mapper(rows, starts, seq_lens, slots)

        calls.append(call)
    return Measured(case, backend_name, bench.time(calls, cold=False, limit_s=limit_s))


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
