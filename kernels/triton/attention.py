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
    k_ptr, v_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
    TILE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: acc float32 [M, D], row_max and row_sum float32 [M] → the same, with the tile taken in.

    factor: what a product is multiplied by to be a score in powers of two (with a soft cap: the exponent of tanh).
    """
    keys = start + tl.arange(0, TILE)
    at = blocks * stride_block + (keys % PAGE) * stride_slot
    if MASKED:  # slots that nobody owns may hold NaN: they are not loaded
        readable = (keys < end) & (keys >= live)
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=readable[None, :] & d_ok[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=readable[:, None] & d_ok[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=d_ok[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=d_ok[None, :], other=0.0)
    # a quantised cache is widened here, exactly; its scales are in `factor` and in the epilogue
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor
    if SOFT_CAP:  # tanh(y) = 1 - 2 / (exp(2y) + 1): no inf / inf at either end
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if MASKED:
        visible = (keys < end)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        elif WINDOW > 0:
            visible = visible & (keys[None, :] < positions[:, None] + WINDOW)
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # a row that has seen no key keeps -inf as its maximum; 0 stands for it inside the exponents only
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    part = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return acc * decay[:, None] + part, new_max, row_sum


@triton.jit
def _attend_range(
    acc, row_max, row_sum, blocks, q, start, stop, end, live, positions,
    k_ptr, v_ptr, table_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
    TILE: tl.constexpr, PAGE: tl.constexpr, CONTIGUOUS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The tiles from start to stop. `blocks` goes in for the tile at start and comes out for the tile at stop."""
    for at in range(start, stop, TILE):
        following = _block_ids(table_ptr, at + TILE, end, TILE, PAGE, CONTIGUOUS)
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, blocks, at, end, live, positions,
            k_ptr, v_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
            TILE, PAGE, WINDOW, CAUSAL, SOFT_CAP, MASKED,
        )  # fmt: skip
        blocks = following
    return acc, row_max, row_sum, blocks


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "seq_len_ptr", "items_ptr"],
)
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, partial_lse_ptr,
    table_ptr, query_start_ptr, seq_len_ptr, items_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, soft_cap,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_head, stride_slot, stride_table,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr,
    CONTIGUOUS: tl.constexpr, SINKS: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head). q, out [T, Hq, D]; caches [num_blocks, Hkv, PAGE, D]; items as in `plan`.

    sinks float32 [Hq], scores that weigh in without a value; k_scale, v_scale float32 [Hkv], what a quantised cache is
    multiplied by. An item with a partial slot writes float32 partial [slot, Hkv, BLOCK_M, D_PAD] and the base-2
    log-sum-exp [slot, Hkv, BLOCK_M]; one without writes out. Rows that see no key get 0. An item whose first token
    lies beyond its sequence does nothing: so a fixed grid can be filled up.
    """
    item = items_ptr + tl.program_id(0) * _ITEM_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    seq, first, start = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    end, live, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    query_base = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_base
    if first >= query_len:
        return
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
    factor = scale * _LOG2E
    cap = soft_cap * _LOG2E
    if QUANTISED:
        factor *= tl.load(k_scale_ptr + kv_head)
    if SOFT_CAP:
        factor *= 2.0 / soft_cap
    acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # tiles that every row sees whole need no mask: those between the edges of the window, or before the diagonal
    last = tl.minimum(first + block_q, query_len) - 1
    whole_end = end
    if CAUSAL:
        whole_end = tl.minimum(end, context + first + 1)
    elif WINDOW > 0:
        whole_end = tl.minimum(end, context + first + WINDOW)
    whole_end = start + tl.maximum(0, whole_end - start) // TILE * TILE
    whole_start = start
    if WINDOW > 0:
        inside = tl.maximum(0, context + last - WINDOW + 1)
        whole_start = tl.minimum(whole_end, start + tl.maximum(0, inside - start + TILE - 1) // TILE * TILE)
    blocks = _block_ids(table_ptr, start, end, TILE, PAGE, CONTIGUOUS)
    if WINDOW > 0:
        acc, row_max, row_sum, blocks = _attend_range(
            acc, row_max, row_sum, blocks, q, start, whole_start, end, live, positions,
            k_ptr, v_ptr, table_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
            TILE, PAGE, CONTIGUOUS, WINDOW, CAUSAL, SOFT_CAP, True,
        )  # fmt: skip
    acc, row_max, row_sum, blocks = _attend_range(
        acc, row_max, row_sum, blocks, q, whole_start, whole_end, end, live, positions,
        k_ptr, v_ptr, table_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
        TILE, PAGE, CONTIGUOUS, WINDOW, CAUSAL, SOFT_CAP, False,
    )  # fmt: skip
    acc, row_max, row_sum, blocks = _attend_range(
        acc, row_max, row_sum, blocks, q, whole_end, end, end, live, positions,
        k_ptr, v_ptr, table_ptr, stride_block, stride_slot, factor, cap, d, d_ok,
        TILE, PAGE, CONTIGUOUS, WINDOW, CAUSAL, SOFT_CAP, True,
    )  # fmt: skip

    if SINKS:  # in the first part of a cut range, and in no other
        sink = tl.load(sinks_ptr + heads, mask=rows_ok & (start <= live), other=float("-inf")) * _LOG2E
        new_max = tl.maximum(row_max, sink)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        acc *= decay[:, None]
        row_sum = row_sum * decay + tl.exp2(sink - shift)
        row_max = new_max
    result = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if QUANTISED:
        result *= tl.load(v_scale_ptr + kv_head)
    if slot < 0:
        token_at = (query_base + tokens).to(tl.int64)[:, None] * stride_out_token
        out_at = token_at + heads[:, None] * stride_out_head + d[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & d_ok[None, :])
    else:
        part = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
        tl.store(partial_ptr + part[:, None] * D_PAD + d[None, :], result)
        # a broken row (NaN) must not pass for an empty one: compare with 0, never ask for > 0
        lse = tl.where(row_sum == 0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum)))
        tl.store(partial_lse_ptr + part, lse)


@triton.jit(do_not_specialize_on_alignment=["query_start_ptr", "merges_ptr"])
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
    if first >= query_len:
        return
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
        acc = acc * decay[:, None] + tl.where(weight[:, None] == 0, 0.0, values * weight[:, None])
        row_sum = row_sum * decay + weight
        row_max = new_max
    tokens = first + m // G
    heads = kv_head * G + m % G
    rows_ok = (m < BLOCK_M // G * G) & (tokens < query_len)
    result = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    token_at = (query_base + tokens).to(tl.int64)[:, None] * stride_out_token
    out_at = token_at + heads[:, None] * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & (d < D)[None, :])
