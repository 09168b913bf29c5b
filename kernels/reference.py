"""The oracle: paged attention in float64, one query at a time, to be read rather than run. Checks values, too.

softmax(scale * q k^T) v over the keys a query may see, gathered one by one through the block table. Nothing is
masked, because nothing that may not be seen is ever read.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.checks import check_attention, check_metadata, check_write
from kernels.metadata import AttentionMetadata
from kernels.quantise import quantise


def visible_keys(position: int, window: int | None, *, causal: bool = True, seq_len: int = 0) -> range:
    """The key positions that the query at `position` sees: all up to itself, or the last `window` of them.

    Not causal: all of the sequence's seq_len keys, or those less than `window` away on either side.
    """
    first = 0 if window is None else max(0, position - window + 1)
    if causal:
        return range(first, position + 1)
    return range(first, seq_len if window is None else min(seq_len, position + window))


def slot_of(block_ids: list[int], position: int, block_size: int) -> int:
    """The flat slot of a position: block_ids[position // B] * B + position % B, in unbounded integers."""
    return block_ids[position // block_size] * block_size + position % block_size


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, soft_cap: float | None, sink: float = -math.inf
) -> Tensor:
    """One query head: q [D], keys and values [n, D], all float64 → [D]. No keys → zeros.

    The sink (Xiao et al. 2023; one learned score a head, as in gpt-oss) is one more score, neither scaled nor capped,
    whose value is zero.
    """
    if keys.shape[0] == 0:
        return torch.zeros_like(q)
    scores = (keys @ q) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.softmax(torch.cat([scores, scores.new_tensor([sink])]), dim=0)[:-1] @ values


def paged_attention(
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
) -> Tensor:
    """float64 [num_tokens, num_q_heads, D]; tokens of no sequence get zeros. Raises ValueError for bad metadata."""
    check_metadata(metadata, k_cache.shape[2])
    check_attention(
        q, k_cache, v_cache, metadata.num_tokens, window, soft_cap, q, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    if starts[0] != 0 or sorted(starts) != starts or starts[metadata.num_seqs] > q.shape[0]:
        raise ValueError(f"query_start_loc {starts} must ascend from 0 to at most {q.shape[0]}")
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()[: metadata.num_seqs]):
        query_len = starts[seq + 1] - starts[seq]
        block_ids = metadata.block_table[seq].tolist()
        for i in range(query_len):
            position = seq_len - query_len + i
            token = starts[seq] + i
            seen = visible_keys(position, window, causal=causal, seq_len=seq_len)
            slots = [slot_of(block_ids, p, block_size) for p in seen]
            if any(not 0 <= slot < num_blocks * block_size for slot in slots):
                raise ValueError(f"sequence {seq} names a block outside of the cache's {num_blocks}")
            blocks = torch.tensor([slot // block_size for slot in slots], dtype=torch.int64)
            offsets = torch.tensor([slot % block_size for slot in slots], dtype=torch.int64)
            keys = _gather(k_cache, blocks, offsets, k_scale)
            values = _gather(v_cache, blocks, offsets, v_scale)
            for head in range(q.shape[1]):
                kv = head // group
                sink = -math.inf if sinks is None else sinks[head].item()
                out[token, head] = attend(q[token, head].double(), keys[:, kv], values[:, kv], scale, soft_cap, sink)
    return out


def _gather(cache: Tensor, blocks: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    """The rows at these slots, float64 [n, num_kv_heads, D], times the scale of their head."""
    rows = cache[blocks, :, offsets].double()
    return rows if scale is None else rows * scale.double()[:, None]


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Put each token's K and V at its slot, one by one. Raises ValueError for a slot outside of the cache."""
    check_write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    num_blocks, _, block_size, _ = k_cache.shape
    if k_scale is not None and v_scale is not None:
        k, v = quantise(k, k_scale, k_cache.dtype), quantise(v, v_scale, v_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()[: k.shape[0]]):
        if slot == -1:
            continue
        if not 0 <= slot < num_blocks * block_size:
            raise ValueError(f"token {token} has slot {slot}; the cache has {num_blocks * block_size}")
        k_cache[slot // block_size, :, slot % block_size] = k[token].to(k_cache.dtype)
        v_cache[slot // block_size, :, slot % block_size] = v[token].to(v_cache.dtype)
