"""Paged attention measured, and beside it torch's own attention over K and V that lie dense.

The dense baseline is given what it likes best: decode with all query heads of a KV head as rows of one product, prefill
and chunks as one causal call. It reads no block table. Its result is also what ours is held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.backends import backend_for, scale_for
from bench.kernels.cases import AttentionCase
from bench.kernels.device import DTYPES, Bench, Call, relative_error
from bench.kernels.results import Baseline, Measured
from kernels.metadata import AttentionMetadata
from kernels.quantise import as_stored, quantise

BASELINE = "torch SDPA, dense"
Dense = Callable[[], Tensor]


@dataclass(frozen=True)
class Inputs:
    """One set: q and out [T, Hq, D], the caches [num_blocks, Hkv, P, D], every sequence's blocks scattered.

    k_scale, v_scale: float32 [Hkv] of a quantised cache, else None.
    """

    q: Tensor
    out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def make_inputs(case: AttentionCase, device: torch.device, seed: int) -> Inputs:
    """Standard normal values, shuffled block ids."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, dtype = case.heads, DTYPES[case.dtype]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    counts = [-(-n // case.block_size) for n in case.seq_lens]
    ids = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    ends = list(itertools.accumulate(counts))
    tables = [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
    cache_shape = (sum(counts) + 1, heads.num_kv, case.block_size, heads.head_dim)
    scale = scale_for(case.kv_dtype, heads.num_kv, device)
    k_cache, v_cache = (_stored(random(*cache_shape), scale, DTYPES[case.kv_dtype]) for _ in range(2))
    q = random(sum(case.query_lens), heads.num_q, heads.head_dim)
    metadata = AttentionMetadata.build(list(case.query_lens), list(case.seq_lens), tables, case.block_size, device)
    return Inputs(q, torch.empty_like(q), k_cache, v_cache, metadata, scale, scale)


def _stored(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return values.to(dtype)
    tokens_first = values.transpose(1, 2).flatten(0, 1)
    return quantise(tokens_first, scale, dtype).unflatten(0, (len(values), -1)).transpose(1, 2).contiguous()


def measure_attention(case: AttentionCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Raises CannotMeasure."""
    backend = backend_for(backend_name, case, bench, case.window, case.split_size, case.tiles)
    num_sets, cold = bench.num_sets(case.work.bytes)
    sets = [make_inputs(case, bench.device, seed) for seed in range(num_sets)]

    def call(inputs: Inputs) -> Call:
        return lambda: backend.paged_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata,
            scale=case.heads.head_dim**-0.5, window=case.window, k_scale=inputs.k_scale, v_scale=inputs.v_scale,
            out=inputs.out,
        )  # fmt: skip

    with torch.inference_mode():
        timing = bench.time([call(inputs) for inputs in sets], cold=cold, limit_s=limit_s)
        first = sets[0]
        call(first)()
        bench.synchronize()
        if not has_dense_form(case):
            return Measured(case, backend_name, timing)
        error = relative_error(first.out, torch.cat([part() for part in dense_calls(case, first)]))
        dense = [all_of(dense_calls(case, inputs)) for inputs in sets]
        baseline = bench.time(dense, cold=cold, limit_s=limit_s)
    return Measured(case, backend_name, timing, Baseline(BASELINE, baseline), error)


def has_dense_form(case: AttentionCase) -> bool:
    """Whether torch has a call for it: of windows it knows none, but a decode's is just its last keys."""
    return case.window is None or max(case.query_lens) == 1


def all_of(parts: list[Dense]) -> Call:
    return lambda: [part() for part in parts]


def dense_calls(case: AttentionCase, inputs: Inputs) -> list[Dense]:
    """One call for each run of sequences of the same lengths; each gives its tokens' part of out, [t, Hq, D]."""
    calls: list[Dense] = []
    lens = list(zip(case.query_lens, case.seq_lens, strict=True))
    row = token = 0
    for (query_len, seq_len), run in itertools.groupby(lens):
        count = len(list(run))
        table = inputs.metadata.block_table[row : row + count]
        first_key = max(0, seq_len - case.window) if case.window is not None else 0
        keys, values = (
            _widened(dense_of(cache, table, first_key, seq_len), scale, inputs.q.dtype)
            for cache, scale in ((inputs.k_cache, inputs.k_scale), (inputs.v_cache, inputs.v_scale))
        )
        q = inputs.q[token : token + count * query_len]
        calls.append(_decode(q, keys, values) if query_len == 1 else _prefill(q, keys, values, query_len))
        row, token = row + count, token + count * query_len
    return calls


def dense_of(cache: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """Keys or values first … end-1 of the sequences of `table` [n, blocks], contiguous [n, Hkv, end - first, D]."""
    block_size = cache.shape[2]
    pages = as_stored(cache)[table[:, : -(-end // block_size)].long()]  # [n, blocks, Hkv, P, D]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, first:end].contiguous().view(cache.dtype)


def _widened(dense: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, Hkv, m, D] as numbers of `dtype`: what a quantised cache stands for."""
    return dense.to(dtype) if scale is None else (dense.float() * scale[:, None, None]).to(dtype)


def _decode(q: Tensor, keys: Tensor, values: Tensor) -> Dense:
    num_seqs, num_kv, _, head_dim = keys.shape
    packed = q.view(num_seqs, num_kv, -1, head_dim)  # the query heads of a KV head are rows
    return lambda: functional.scaled_dot_product_attention(packed, keys, values).reshape(q.shape)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, query_len: int) -> Dense:
    num_seqs, _, seq_len, head_dim = keys.shape
    heads_first = q.view(num_seqs, query_len, -1, head_dim).transpose(1, 2)
    mask: Tensor | None = None
    if query_len != seq_len and q.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(query_len, seq_len)
    elif query_len != seq_len:
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)

    def call() -> Tensor:
        result = functional.scaled_dot_product_attention(
            heads_first, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return result.transpose(1, 2).reshape(q.shape)

    return call
