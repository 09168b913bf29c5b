"""The shapes and dtypes that all backends accept. Looks at no values (the reference does), so it costs microseconds.

Raises ValueError, which names the tensor: a caller's mistake must not become a wild read in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError(
            "caches must be contiguous [num_blocks, num_kv_heads, block_size, head_dim], "
            f"not {tuple(k_cache.shape)} with strides {k_cache.stride()}"
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}"
        )


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_tokens: int,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """num_tokens: how many the metadata counts."""
    check_caches(k_cache, v_cache)
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


def check_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check_caches(k_cache, v_cache)
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
