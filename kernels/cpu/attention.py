"""Paged attention on a CPU: one kernel for prefill, chunks and decode. Knows addresses; the Python side knows tensors.

A work item is (sequence, up to ROWS // group queries, KV head). Its rows are all queries of all query heads that
share the KV head, so each loaded K/V tile serves them all. Tiles of TILE keys lie at multiples of TILE of the
*absolute* position:
    scores = q K^T           (K gathered through the block table, transposed, widened to float32)
    softmax, online          (running maximum and sum per row: Milakov and Gimelshein 2018)
    result = decay * result + weights V
Each row's arithmetic is the same sequence of operations whatever other rows, sequences or chunks are computed with
it: tiles it does not see leave it untouched to the bit. So alone, in a batch and in chunks give equal bits.

Scores are kept times log2(e), for exp2. With a soft cap c, q is scaled by 2 log2(e) scale / c instead, and the score is
c log2(e) tanh_half of the product.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.jit import kernel, part
from kernels.cpu.matmul import multiply
from kernels.cpu.tiles import (
    gather_keys_transposed,
    gather_values,
    locate_rows,
    prefetch_rows,
    row_from_float,
    row_to_float,
)
from kernels.cpu.vectors import (
    LANES,
    add,
    exp2,
    fetch_add,
    first,
    keep_lanes,
    load_f32,
    max_lanes,
    maximum,
    mul,
    read_float,
    read_i32,
    splat,
    store_f32,
    sub,
    sum_lanes,
    tanh_half,
    write_float,
)

TILE = 64  # keys
ROWS = 96  # at most, unless one token has more query heads to a KV head
MINUS_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


def rows_of(group: int) -> int:
    """Rows of a work item at most, for `group` query heads to a KV head."""
    return max(ROWS, group)


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory of one thread: q, scores, result, K^T, V, a zero row, three numbers a row, two addresses a key."""
    rows = rows_of(group)
    return 4 * (2 * rows * head_dim + rows * TILE + 2 * TILE * head_dim + head_dim + 3 * rows) + 16 * TILE


@part
def softmax_row(scores, begin, end, low, high, peak, total, decay, score_cap):
    """Scores of one row of a tile → weights; updates the row's running peak and total, and says its decay.

    Lanes of [begin, end), multiples of 16, are there; the row sees those of [low, high), and the others become 0.
    """
    if low >= high:
        nothing = splat(ZERO)
        for n in range(begin, end, LANES):
            store_f32(scores + 4 * n, nothing)
        write_float(decay, ONE)
        return
    if score_cap > ZERO:
        cap = splat(score_cap)
        for n in range(begin, end, LANES):
            store_f32(scores + 4 * n, mul(cap, tanh_half(load_f32(scores + 4 * n))))
    tops = splat(MINUS_INF)
    for n in range(begin, end, LANES):
        visible = keep_lanes(load_f32(scores + 4 * n), low - n, high - n, MINUS_INF)
        store_f32(scores + 4 * n, visible)
        tops = maximum(tops, visible)
    old_peak = read_float(peak)
    new_peak = max(old_peak, max_lanes(tops))
    level = splat(new_peak)
    sums = splat(ZERO)
    for n in range(begin, end, LANES):
        weights = exp2(sub(load_f32(scores + 4 * n), level))
        store_f32(scores + 4 * n, weights)
        sums = add(sums, weights)
    factor = first(exp2(splat(np.float32(old_peak - new_peak))))
    write_float(decay, factor)
    write_float(peak, new_peak)
    write_float(total, np.float32(read_float(total) * factor + sum_lanes(sums)))


@part
def attend_item(
    scratch, q, q_token, q_head, out, out_token, out_head, k_cache, v_cache, table_row, first_position, num_queries,
    group, head_dim, kind, item_bytes, num_blocks, block_size, block_bytes, head_offset, rows_capacity, q_factor,
    window, score_cap,
):  # fmt: skip
    """One work item. q and out point at its first token and query head. False if the table names no such block."""
    row_bytes = 4 * head_dim
    tile_bytes = 4 * TILE
    num_rows = num_queries * group
    queries = scratch
    result = queries + rows_capacity * row_bytes
    scores = result + rows_capacity * row_bytes
    keys = scores + rows_capacity * tile_bytes
    values = keys + TILE * row_bytes
    zero_row = values + TILE * row_bytes
    peaks = zero_row + row_bytes
    totals = peaks + 4 * rows_capacity
    decays = totals + 4 * rows_capacity
    k_rows = decays + 4 * rows_capacity
    v_rows = k_rows + 8 * TILE

    nothing = splat(ZERO)
    for d in range(0, head_dim, LANES):
        store_f32(zero_row + 4 * d, nothing)
    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            row_to_float(q + i * q_token + g * q_head, queries + row * row_bytes, head_dim, kind, q_factor)
            for d in range(0, head_dim, LANES):
                store_f32(result + row * row_bytes + 4 * d, nothing)
            write_float(peaks + 4 * row, MINUS_INF)
            write_float(totals + 4 * row, ZERO)

    valid = True
    first_key = max(0, first_position - window + 1) if window > 0 else 0
    last_key = first_position + num_queries  # one past it
    for tile_start in range(first_key // TILE * TILE, last_key, TILE):
        begin = max(first_key - tile_start, 0)
        end = min(last_key - tile_start, TILE)
        lane_begin = begin // LANES * LANES
        lane_end = (end + LANES - 1) // LANES * LANES
        valid &= locate_rows(
            k_rows, v_rows, lane_begin, lane_end, begin, end, tile_start, table_row, k_cache, v_cache, head_offset,
            zero_row, num_blocks, block_size, block_bytes, item_bytes * head_dim,
        )  # fmt: skip
        prefetch_rows(
            tile_start + TILE, min(tile_start + 2 * TILE, last_key), table_row, k_cache, v_cache, head_offset,
            num_blocks, block_size, block_bytes, item_bytes * head_dim,
        )  # fmt: skip
        gather_keys_transposed(k_rows, keys, tile_bytes, lane_begin, lane_end, head_dim, kind)
        gather_values(v_rows, values, begin, end, head_dim, kind)
        multiply(
            num_rows, lane_end - lane_begin, queries, row_bytes, keys + 4 * lane_begin, tile_bytes,
            scores + 4 * lane_begin, tile_bytes, head_dim, 0,
        )  # fmt: skip
        for i in range(num_queries):
            position = first_position + i - tile_start
            low = max(begin, position - window + 1) if window > 0 else begin
            high = min(end, position + 1)
            for g in range(group):
                row = i * group + g
                softmax_row(
                    scores + row * tile_bytes, lane_begin, lane_end, low, high,
                    peaks + 4 * row, totals + 4 * row, decays + 4 * row, score_cap,
                )  # fmt: skip
        multiply(
            num_rows, head_dim, scores + 4 * begin, tile_bytes, values + begin * row_bytes, row_bytes,
            result, row_bytes, end - begin, decays,
        )  # fmt: skip

    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            total = read_float(totals + 4 * row)
            factor = ZERO if total == ZERO else np.float32(ONE / total)
            row_from_float(result + row * row_bytes, out + i * out_token + g * out_head, head_dim, kind, factor)
    return valid


@kernel
def attend(
    counter, scratch, q, q_token, q_head, out, out_token, out_head, k_cache, v_cache, num_blocks, num_kv_heads,
    block_size, head_dim, kind, item_bytes, group, rows_capacity, num_tokens, query_starts,
    seq_lens, table, table_stride, table_blocks, num_seqs, scale, window, soft_cap,
):  # fmt: skip
    """Attend for the work items that this thread claims from `counter` (address of an int64 0; without one, 0: all).

    All arguments are int64 (addresses, counts, strides in bytes) but scale and soft_cap, float64. A window or
    a soft cap of 0 means none.
    Returns -1, or a sequence whose block table names a block that the cache lacks, or whose tokens exceed the table or
    the step; nothing outside of them is touched.
    """
    q_factor = np.float32(scale * math.log2(math.e))
    if soft_cap > 0.0:
        q_factor = np.float32(2.0 * scale * math.log2(math.e) / soft_cap)
    score_cap = np.float32(soft_cap * math.log2(math.e))
    queries_per_item = rows_capacity // group
    head_bytes = block_size * head_dim * item_bytes
    block_bytes = num_kv_heads * head_bytes
    bad_seq = -1
    item = 0
    claimed = fetch_add(counter, 1) if counter != 0 else 0
    for seq in range(num_seqs):
        start = int(read_i32(query_starts + 4 * seq))
        stop = int(read_i32(query_starts + 4 * (seq + 1)))
        seq_len = int(read_i32(seq_lens + 4 * seq))
        if start < 0 or stop > num_tokens or seq_len > table_blocks * block_size:
            bad_seq = seq
            continue
        for token in range(start, stop, queries_per_item):
            for head in range(num_kv_heads):
                if item == claimed:
                    valid = attend_item(
                        scratch, q + token * q_token + head * group * q_head, q_token, q_head,
                        out + token * out_token + head * group * out_head, out_token, out_head, k_cache, v_cache,
                        table + seq * table_stride, seq_len - (stop - token), min(queries_per_item, stop - token),
                        group, head_dim, kind, item_bytes, num_blocks, block_size, block_bytes, head * head_bytes,
                        rows_capacity, q_factor, window, score_cap,
                    )  # fmt: skip
                    if not valid:
                        bad_seq = seq
                    claimed = fetch_add(counter, 1) if counter != 0 else claimed + 1
                item += 1
    return bad_seq
