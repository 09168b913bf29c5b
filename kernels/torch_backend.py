"""The `torch` backend: plain PyTorch, any device, any dtype and head size. Right before fast.

Each sequence's visible pages are gathered into one dense run, then attended in float32. It is the fallback where
no compiled kernel fits, and a second opinion in tests. A sequence is computed by itself, so its result does not
depend on which others are in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_attention, check_metadata, check_write
from kernels.copying import copy_blocks
from kernels.metadata import AttentionMetadata
from kernels.quantise import as_stored, quantise

QUERY_CHUNK = 256  # queries scored at once: bounds the score matrix of a long prefill


class TorchBackend:
    name = "torch"

    def __init__(self, num_threads: int | None = None) -> None:
        """num_threads is taken and ignored: PyTorch's own setting rules its operations."""
        self.counters = {"write_kv": 0, "paged_attention": 0, "copy_blocks": 0}

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        check_write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        self.counters["write_kv"] += 1
        block_size = k_cache.shape[2]
        slots = slot_mapping[: k.shape[0]]
        tokens = (slots >= 0).nonzero().squeeze(1)
        slots = slots[tokens]
        blocks, offsets = slots // block_size, slots % block_size
        for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            rows = x[tokens]
            rows = rows.to(cache.dtype) if scale is None else quantise(rows, scale, cache.dtype)
            as_stored(cache)[blocks, :, offsets] = as_stored(rows)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor,
    ) -> None:
        check_metadata(metadata, k_cache.shape[2])
        check_attention(
            q, k_cache, v_cache, metadata.num_tokens, window, soft_cap, out,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        self.counters["paged_attention"] += 1
        block_size = k_cache.shape[2]
        starts = metadata.query_start_loc.tolist()
        seq_lens = metadata.seq_lens.tolist()
        for seq in range(metadata.num_seqs):
            for begin in range(starts[seq], starts[seq + 1], QUERY_CHUNK):
                end = min(begin + QUERY_CHUNK, starts[seq + 1])
                first_position = seq_lens[seq] - (starts[seq + 1] - begin)
                last_key = first_position + (end - begin)  # one past it
                if not causal:
                    last_key = seq_lens[seq] if window is None else min(seq_lens[seq], last_key + window - 1)
                if last_key <= 0:
                    out[begin:end] = 0
                    continue
                first_key = 0 if window is None else max(0, first_position - window + 1)
                first_block = first_key // block_size
                blocks = metadata.block_table[seq, first_block : -(-last_key // block_size)].long()
                live = slice(first_key - first_block * block_size, last_key - first_block * block_size)
                out[begin:end] = _attend(
                    q[begin:end],
                    _gather(k_cache, blocks, live, k_scale),
                    _gather(v_cache, blocks, live, v_scale),
                    first_position,
                    first_key,
                    scale,
                    window,
                    soft_cap,
                    causal,
                    sinks,
                )

    def copy_blocks(self, caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        self.counters["copy_blocks"] += 1
        copy_blocks(caches, src, dst)

    def warm_up(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        window: int | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
        sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Nothing is compiled here, so there is nothing to do."""


def _gather(cache: Tensor, blocks: Tensor, live: slice, scale: Tensor | None) -> Tensor:
    """The live slots of these blocks in order, float32 [num_kv_heads, num_keys, D]; dead ones are cut off."""
    pages = as_stored(cache)[blocks].view(cache.dtype)  # [n, num_kv_heads, block_size, D]
    rows = pages.transpose(0, 1).flatten(1, 2)[:, live].float()
    return rows if scale is None else rows * scale[:, None, None]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first_position: int,
    first_key: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
    sinks: Tensor | None,
) -> Tensor:
    """q [n, num_q_heads, D] at positions first_position.. over keys [num_kv_heads, m, D] at first_key.. → like q."""
    num_kv_heads, num_keys, head_dim = keys.shape
    rows = q.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [kv heads, group * n, D]
    scores = torch.matmul(rows, keys.transpose(1, 2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_at = torch.arange(first_position, first_position + q.shape[0], device=q.device)[:, None]
    key_at = torch.arange(first_key, first_key + num_keys, device=q.device)[None, :]
    hidden = key_at > query_at if causal else torch.zeros_like(key_at > query_at)
    if window is not None:
        hidden |= key_at <= query_at - window
        if not causal:
            hidden |= key_at >= query_at + window
    scores = scores.view(num_kv_heads, -1, q.shape[0], num_keys).masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:  # one more score a row, dropped again behind the softmax
        sink = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    blind = hidden.all(dim=1, keepdim=True)  # more query tokens than visible ones: the softmax over nothing is NaN
    weights = weights.masked_fill(blind, 0.0)
    result = torch.matmul(weights.flatten(1, 2), values)  # [kv heads, group * n, D]
    return result.view(q.shape[1], q.shape[0], head_dim).transpose(0, 1).to(q.dtype)


def create(num_threads: int | None) -> TorchBackend:
    return TorchBackend(num_threads)
