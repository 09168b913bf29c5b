"""Paged attention: one kernel for prefill and decode over block tables, and the merge of split key ranges.

All query heads of a KV head are packed into the rows of one tile (row m: token m // G, head m % G), so K and V are
read once for all of them. Softmax is online (Milakov and Gimelshein 2018; Dao 2023) in powers of two. The block id of
the next tile is loaded one tile ahead: with the load inside the tile, Triton's pipeliner spends its stages on that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.plan import ITEM_FIELDS, MERGE_FIELDS

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_MERGE_FIELDS = tl.constexpr(MERGE_FIELDS)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_ids(table_ptr, start, end, TILE: tl.constexpr, PAGE: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """The block id(s) of the tile of keys that begins at `start`, int64: one, or one per key. 0 beyond `end`."""
    if CONTIGUOUS:
        ids = tl.load(table_ptr + start // PAGE, mask=start < end, other=0).to(tl.int64)
    else:
        keys = start + tl.arange(0, TILE)
        ids = tl.load(table_ptr + keys // PAGE, mask=keys < end, other=0).to(tl.int64)
    return ids


@triton.jit
def _attend_tile(
    acc, row_max, row_sum, q, blocks, start, end, live, positions,
    k_ptr, v_ptr, stride_block, stride_slot, scale, soft_cap, d, d_ok,
    TILE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """One tile of keys: acc float32 [M, D], row_max and row_sum float32 [M] → the same, with the tile taken in."""
    keys = start + tl.arange(0, TILE)
    at = blocks * stride_block + (keys % PAGE) * stride_slot
    if MASKED:  # slots that nobody owns may hold NaN: they are not loaded
        readable = (keys < end) & (keys >= live)
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=readable[None, :] & d_ok[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=readable[:, None] & d_ok[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=d_ok[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=d_ok[None, :], other=0.0)
    if FP32_DOT:
        scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
    else:
        scores = tl.dot(q, k) * scale
    if SOFT_CAP:  # tanh(y) = 1 - 2 / (exp(2y) + 1): no inf / inf at either end
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / soft_cap)) + 1.0))
    scores = scores * _LOG2E
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # a row that has seen no key keeps -inf as its maximum; 0 stands for it inside the exponents only
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    if FP32_DOT:
        part = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
    else:
        part = tl.dot(weights.to(v.dtype), v)
    return acc * decay[:, None] + part, new_max, row_sum


@triton.jit(do_not_specialize=["stride_table"])
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, partial_lse_ptr,
    table_ptr, query_start_ptr, seq_len_ptr, items_ptr,
    scale, soft_cap,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_head, stride_slot, stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, CONTIGUOUS: tl.constexpr,
    FP32_DOT: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head). q, out [T, Hq, D]; caches [num_blocks, Hkv, PAGE, D]; items as in `plan`.

    An item with a partial slot writes float32 partial [slot, Hkv, BLOCK_M, D_PAD] and the base-2 log-sum-exp
    [slot, Hkv, BLOCK_M]; one without writes out. Rows that see no key get 0.
    """
    item = items_ptr + tl.program_id(0) * _ITEM_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    seq, first, start = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    end, live, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    query_base = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_base
    context = tl.load(seq_len_ptr + seq) - query_len
    block_q: tl.constexpr = BLOCK_M // G

    m = tl.arange(0, BLOCK_M)
    tokens = first + m // G
    heads = kv_head * G + m % G
    rows_ok = (m < block_q * G) & (tokens < query_len)  # G need not divide the tile
    positions = context + tokens
    d = tl.arange(0, D_PAD)
    d_ok = d < D
    q_at = (query_base + tokens).to(tl.int64)[:, None] * stride_q_token + heads[:, None] * stride_q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=rows_ok[:, None] & d_ok[None, :], other=0.0)

    k_ptr += kv_head.to(tl.int64) * stride_head
    v_ptr += kv_head.to(tl.int64) * stride_head
    table_ptr += seq.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # tiles that every row sees whole need no mask: between the left edge of the window and the diagonal
    last = tl.minimum(first + block_q, query_len) - 1
    whole_end = tl.minimum(end, context + first + 1)
    whole_end = start + tl.maximum(0, whole_end - start) // TILE * TILE
    whole_start = start
    if WINDOW > 0:
        inside = tl.maximum(0, context + last - WINDOW + 1)
        whole_start = tl.minimum(whole_end, start + tl.maximum(0, inside - start + TILE - 1) // TILE * TILE)
    blocks = _block_ids(table_ptr, start, end, TILE, PAGE, CONTIGUOUS)
    if WINDOW > 0:
        for at in range(start, whole_start, TILE):
            following = _block_ids(table_ptr, at + TILE, end, TILE, PAGE, CONTIGUOUS)
            acc, row_max, row_sum = _attend_tile(
                acc, row_max, row_sum, q, blocks, at, end, live, positions,
                k_ptr, v_ptr, stride_block, stride_slot, scale, soft_cap, d, d_ok,
                TILE, PAGE, WINDOW, SOFT_CAP, True, FP32_DOT,
            )  # fmt: skip
            blocks = following
    for at in range(whole_start, whole_end, TILE):
        following = _block_ids(table_ptr, at + TILE, end, TILE, PAGE, CONTIGUOUS)
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, blocks, at, end, live, positions,
            k_ptr, v_ptr, stride_block, stride_slot, scale, soft_cap, d, d_ok,
            TILE, PAGE, WINDOW, SOFT_CAP, False, FP32_DOT,
        )  # fmt: skip
        blocks = following
    for at in range(whole_end, end, TILE):
        following = _block_ids(table_ptr, at + TILE, end, TILE, PAGE, CONTIGUOUS)
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, blocks, at, end, live, positions,
            k_ptr, v_ptr, stride_block, stride_slot, scale, soft_cap, d, d_ok,
            TILE, PAGE, WINDOW, SOFT_CAP, True, FP32_DOT,
        )  # fmt: skip
        blocks = following

    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if slot < 0:
        token_at = (query_base + tokens).to(tl.int64)[:, None] * stride_out_token
        out_at = token_at + heads[:, None] * stride_out_head + d[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & d_ok[None, :])
    else:
        part = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
        tl.store(partial_ptr + part[:, None] * D_PAD + d[None, :], result)
        lse = tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
        tl.store(partial_lse_ptr + part, lse)


@triton.jit
def merge_splits_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, query_start_ptr, merges_ptr,
    stride_out_token, stride_out_head,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program (merge, KV head): the parts of one item in order, one after the other, so that the sum has one order."""
    merge = merges_ptr + tl.program_id(0) * _MERGE_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    seq, first = tl.load(merge), tl.load(merge + 1)
    slot, count = tl.load(merge + 2), tl.load(merge + 3)
    query_base = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_base
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for part in range(count):
        at = ((slot.to(tl.int64) + part) * num_kv_heads + kv_head) * BLOCK_M + m
        lse = tl.load(partial_lse_ptr + at)
        values = tl.load(partial_ptr + at[:, None] * D_PAD + d[None, :])
        new_max = tl.maximum(row_max, lse)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight, decay = tl.exp2(lse - shift), tl.exp2(row_max - shift)
        acc = acc * decay[:, None] + tl.where(weight[:, None] > 0, values * weight[:, None], 0.0)
        row_sum = row_sum * decay + weight
        row_max = new_max
    tokens = first + m // G
    heads = kv_head * G + m % G
    rows_ok = (m < BLOCK_M // G * G) & (tokens < query_len)
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    token_at = (query_base + tokens).to(tl.int64)[:, None] * stride_out_token
    out_at = token_at + heads[:, None] * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & (d < D)[None, :])
