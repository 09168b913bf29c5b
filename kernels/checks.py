"""The shapes and dtypes that all backends accept. Looks at no values (the reference does), so it costs microseconds.

Raises ValueError, which names the tensor: a caller's mistake must not become a wild read in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """A cache may be cut out of a bigger pool: any strides, as long as head_dim is contiguous and K and V agree."""
    if k_cache.dim() != 4 or k_cache.stride(3) != 1 or k_cache.shape[2] < 1:
        raise ValueError(
            "caches must be [num_blocks, num_kv_heads, block_size, head_dim], the last dimension contiguous, "
            f"not {tuple(k_cache.shape)} with strides {k_cache.stride()}"
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype} with strides {k_cache.stride()}, "
            f"v_cache {tuple(v_cache.shape)} {v_cache.dtype} with strides {v_cache.stride()}; they must be alike"
        )


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """A quantised cache has both scales, another has none."""
    num_kv_heads = k_cache.shape[1]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (k_cache.dtype in LIMITS):
            raise ValueError(f"{name} is {'missing' if scale is None else 'given'} for a cache of {k_cache.dtype}")
        if scale is not None:
            _check_per_head(name, scale, num_kv_heads)


def _check_per_head(name: str, tensor: Tensor, num_heads: int) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != (num_heads,) or tensor.stride(0) != 1:
        raise ValueError(
            f"{name} must be contiguous float32 [{num_heads}], one a head; it is {tensor.dtype} {tuple(tensor.shape)}"
        )


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_tokens: int,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
    *,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """num_tokens: how many the metadata counts."""
    check_caches(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    if q.dim() != 3 or q.shape != out.shape or q.dtype != out.dtype:
        raise ValueError(f"q is {tuple(q.shape)} {q.dtype}, out {tuple(out.shape)} {out.dtype}; they must be alike")
    num_rows, num_q_heads, head_dim = q.shape
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"q has head_dim {head_dim}, the cache {k_cache.shape[3]}")
    if num_q_heads % k_cache.shape[1]:
        raise ValueError(f"{num_q_heads} query heads cannot share {k_cache.shape[1]} KV heads evenly")
    if q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the last dimension of q and out must be contiguous")
    if num_rows < num_tokens:
        raise ValueError(f"q has {num_rows} tokens, the metadata {num_tokens}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the token itself), not {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, not {soft_cap}")
    if k_cache.dtype != q.dtype and k_cache.dtype not in LIMITS:
        raise ValueError(f"q is {q.dtype}, the cache {k_cache.dtype}; they must be alike, or the cache quantised")
    if sinks is not None:
        _check_per_head("sinks", sinks, num_q_heads)


def check_metadata(metadata: AttentionMetadata, block_size: int) -> None:
    """The part that is the same for all layers of a step."""
    num_seqs = metadata.num_seqs
    for name, tensor, dtype, length in (
        ("query_start_loc", metadata.query_start_loc, torch.int32, num_seqs + 1),
        ("seq_lens", metadata.seq_lens, torch.int32, num_seqs),
        ("block_table", metadata.block_table, torch.int32, num_seqs),
    ):
        if tensor.dtype != dtype or tensor.shape[0] < length or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be {dtype} with {length} rows, last dimension contiguous; "
                f"it is {tensor.dtype} {tuple(tensor.shape)}"
            )
    if metadata.block_table.shape[1] * block_size < metadata.max_seq_len:
        raise ValueError(
            f"a block table of {metadata.block_table.shape[1]} blocks of {block_size} slots "
            f"cannot hold {metadata.max_seq_len} tokens"
        )


def check_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    check_caches(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    tail = (k_cache.shape[1], k_cache.shape[3])
    if k.dim() != 3 or k.shape != v.shape or k.shape[1:] != tail:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be [num_tokens, {tail[0]}, {tail[1]}]")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of k and v must be contiguous")
    if k.dtype != v.dtype:
        raise ValueError(f"k is {k.dtype}, v is {v.dtype}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape[0] < k.shape[0] or slot_mapping.stride(0) != 1:
        raise ValueError(
            f"slot_mapping must be contiguous int64 with {k.shape[0]} slots; "
            f"it is {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )


def check_rotate_and_write(
    qkv: Tensor,
    num_heads: int,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """What `kernels.fusion` asks for."""
    check_caches(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if qkv.dim() != 2 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must be [num_tokens, ({num_heads} + 2 * {num_kv_heads}) * {head_dim}] with contiguous rows, "
            f"not {tuple(qkv.shape)}"
        )
    if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != head_dim or not table.is_contiguous():
        raise ValueError(
            f"the table of angles must be contiguous float32 [n, {head_dim}], not {table.dtype} {tuple(table.shape)}"
        )
    if table.shape[0] < 1:
        raise ValueError("the table of angles is empty")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        if tensor.dtype != torch.int64 or tensor.shape[0] < qkv.shape[0] or tensor.stride(0) != 1:
            raise ValueError(
                f"{name} must be contiguous int64 with {qkv.shape[0]} elements; "
                f"it is {tensor.dtype} {tuple(tensor.shape)}"
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.dtype != torch.float32 or weight.shape != (head_dim,)):
            raise ValueError(f"{name} must be float32 [{head_dim}], not {weight.dtype} {tuple(weight.shape)}")
