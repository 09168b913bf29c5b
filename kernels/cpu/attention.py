"""Paged attention on a CPU: one kernel for prefill, chunks and decode. Knows addresses; the Python side knows tensors.

A work item is (sequence, up to ROWS // group queries, KV head). Its rows are all queries of all query heads that
share the KV head, so each loaded K/V tile serves them all. Tiles of TILE keys lie at multiples of TILE of the
*absolute* position:
    scores = q K^T           (K gathered through the block table, transposed, widened to float32)
    softmax, online          (running maximum and sum per row: Milakov and Gimelshein 2018)
    result = decay * result + weights V
Each row's arithmetic is the same sequence of operations whatever other rows, sequences or chunks are computed with
it: tiles it does not see leave it untouched to the bit. So alone, in a batch and in chunks give equal bits. Few rows,
as in decode, take another form (`few_rows`) with the same operations on each number.

Scores are kept times log2(e), for exp2. With a soft cap c, q is scaled by 2 log2(e) scale / c instead, and the score is
c log2(e) tanh_half of the product.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.concurrency import raise_to, read_shared
from kernels.cpu.few_rows import attend_few, is_few
from kernels.cpu.jit import part, work
from kernels.cpu.matmul import multiply
from kernels.cpu.softmax import MINUS_INF, ONE, TILE, ZERO, softmax_tile
from kernels.cpu.team import claim
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
    load_f32,
    read_double,
    read_i32,
    read_i64,
    splat,
    store_f32,
    sum_lanes,
    write_float,
)

ROWS = 96  # at most, unless one token has more query heads to a KV head

# The arguments of ATTEND, words of eight bytes: addresses, counts, strides in bytes, int64 unless said otherwise.
WORDS = (
    "counter",  # items that were claimed; the caller sets it to 0
    "bad_seq",  # the caller sets it to -1. After that: a sequence whose block table names a block that the cache lacks,
    # or whose tokens exceed the table or the step; nothing outside of them was touched
    "present",  # address of an int64: about how many threads claim, hence which item one will probably claim next
    "q",
    "out",
    "k_cache",
    "v_cache",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    "num_blocks",
    "num_kv_heads",
    "block_size",
    "head_dim",
    "kind",  # of elements, `vectors`
    "item_bytes",
    "group",
    "rows_capacity",  # `rows_of` the group
    "num_tokens",
    "query_starts",
    "seq_lens",
    "table",
    "table_stride",
    "table_blocks",
    "num_seqs",
    "window",  # 0: none
    "scale",  # float64
    "soft_cap",  # float64; 0: none
)
COUNTER, BAD_SEQ, PRESENT, Q, OUT, K_CACHE, V_CACHE, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, KIND, ITEM_BYTES, GROUP, ROWS_CAPACITY, NUM_TOKENS, QUERY_STARTS, SEQ_LENS, TABLE, TABLE_STRIDE, TABLE_BLOCKS, NUM_SEQS, WINDOW, SCALE, SOFT_CAP = range(len(WORDS))  # fmt: skip  # noqa: E501


def rows_of(group: int) -> int:
    """Rows of a work item at most, for `group` query heads to a KV head."""
    return max(ROWS, group)


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory of one thread: q, scores, result, K^T, V, a zero row, 18 numbers a row, two addresses a key."""
    rows = rows_of(group)
    return 4 * (2 * rows * head_dim + rows * TILE + 2 * TILE * head_dim + head_dim + 18 * rows) + 16 * TILE


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
    decays = peaks + 4 * rows_capacity
    totals = decays + 4 * rows_capacity
    k_rows = totals + 64 * rows_capacity
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
            store_f32(totals + 64 * row, nothing)

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
        softmax_tile(
            scores, lane_begin, lane_end, begin, end, first_position - tile_start, num_queries, group, window,
            peaks, decays, totals, score_cap,
        )  # fmt: skip
        multiply(
            num_rows, head_dim, scores + 4 * begin, tile_bytes, values + begin * row_bytes, row_bytes,
            result, row_bytes, end - begin, decays,
        )  # fmt: skip

    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            total = sum_lanes(load_f32(totals + 64 * row))
            factor = ZERO if total == ZERO else np.float32(ONE / total)
            row_from_float(result + row * row_bytes, out + i * out_token + g * out_head, head_dim, kind, factor)
    return valid


@part
def next_with_items(seq, query_starts, seq_lens, num_seqs, num_tokens, max_len):
    """The first sequence from `seq` on that has tokens in this step, or num_seqs: (it, first token, one past the last,
    its length, the last one passed over because its numbers cannot be right, or -1)."""
    bad_seq = -1
    while seq < num_seqs:
        start = int(read_i32(query_starts + 4 * seq))
        stop = int(read_i32(query_starts + 4 * (seq + 1)))
        seq_len = int(read_i32(seq_lens + 4 * seq))
        if start < 0 or stop > num_tokens or seq_len > max_len:
            bad_seq = seq
        elif start < stop:
            return seq, start, stop, seq_len, bad_seq
        seq += 1
    return seq, 0, 0, 0, bad_seq


@part
def next_item(
    seq, token, head, stop, seq_len, num_kv_heads, queries_per_item, query_starts, seq_lens, num_seqs, num_tokens,
    max_len,
):  # fmt: skip
    """The work item after (seq, token, head), in the form (seq, token, head, stop, seq_len, bad_seq)."""
    head += 1
    if head < num_kv_heads:
        return seq, token, head, stop, seq_len, -1
    token += queries_per_item
    if token < stop:
        return seq, token, 0, stop, seq_len, -1
    seq, token, stop, seq_len, bad_seq = next_with_items(seq + 1, query_starts, seq_lens, num_seqs, num_tokens, max_len)
    return seq, token, 0, stop, seq_len, bad_seq


@work
def attend(a, scratch, owner):
    """Attend for the work items that this thread claims; how many it did. a: address of WORDS; owner: see `team`."""
    counter = a + 8 * COUNTER
    threads = read_shared(read_i64(a + 8 * PRESENT))
    q = read_i64(a + 8 * Q)
    out = read_i64(a + 8 * OUT)
    k_cache = read_i64(a + 8 * K_CACHE)
    v_cache = read_i64(a + 8 * V_CACHE)
    q_token = read_i64(a + 8 * Q_TOKEN)
    q_head = read_i64(a + 8 * Q_HEAD)
    out_token = read_i64(a + 8 * OUT_TOKEN)
    out_head = read_i64(a + 8 * OUT_HEAD)
    num_blocks = read_i64(a + 8 * NUM_BLOCKS)
    num_kv_heads = read_i64(a + 8 * NUM_KV_HEADS)
    block_size = read_i64(a + 8 * BLOCK_SIZE)
    head_dim = read_i64(a + 8 * HEAD_DIM)
    kind = read_i64(a + 8 * KIND)
    item_bytes = read_i64(a + 8 * ITEM_BYTES)
    group = read_i64(a + 8 * GROUP)
    rows_capacity = read_i64(a + 8 * ROWS_CAPACITY)
    num_tokens = read_i64(a + 8 * NUM_TOKENS)
    query_starts = read_i64(a + 8 * QUERY_STARTS)
    seq_lens = read_i64(a + 8 * SEQ_LENS)
    table = read_i64(a + 8 * TABLE)
    table_stride = read_i64(a + 8 * TABLE_STRIDE)
    table_blocks = read_i64(a + 8 * TABLE_BLOCKS)
    num_seqs = read_i64(a + 8 * NUM_SEQS)
    window = read_i64(a + 8 * WINDOW)
    scale, soft_cap = read_double(a + 8 * SCALE), read_double(a + 8 * SOFT_CAP)
    q_factor = np.float32(scale * math.log2(math.e))
    if soft_cap > 0.0:
        q_factor = np.float32(2.0 * scale * math.log2(math.e) / soft_cap)
    score_cap = np.float32(soft_cap * math.log2(math.e))
    queries_per_item = rows_capacity // group
    head_bytes = block_size * head_dim * item_bytes
    block_bytes = num_kv_heads * head_bytes
    max_len = table_blocks * block_size
    seq, token, stop, seq_len, bad_seq = next_with_items(0, query_starts, seq_lens, num_seqs, num_tokens, max_len)
    head = 0
    item = 0
    next_seq, next_token, next_head, next_stop, next_len = seq, token, head, stop, seq_len
    following = 0  # the number of that item
    done = 0
    claimed = claim(counter, owner)
    while True:
        while item < claimed and seq < num_seqs:
            seq, token, head, stop, seq_len, bad = next_item(
                seq, token, head, stop, seq_len, num_kv_heads, queries_per_item, query_starts, seq_lens, num_seqs,
                num_tokens, max_len,
            )  # fmt: skip
            bad_seq = max(bad_seq, bad)
            item += 1
        if seq >= num_seqs:
            if bad_seq >= 0:
                raise_to(a + 8 * BAD_SEQ, bad_seq)
            return done
        first_position = seq_len - (stop - token)
        num_queries = min(queries_per_item, stop - token)
        q_at = q + token * q_token + head * group * q_head
        out_at = out + token * out_token + head * group * out_head
        table_row = table + seq * table_stride
        if is_few(num_queries * group, head_dim, kind, block_size):
            while following < item + threads and next_seq < num_seqs:
                next_seq, next_token, next_head, next_stop, next_len, _ = next_item(
                    next_seq, next_token, next_head, next_stop, next_len, num_kv_heads, queries_per_item,
                    query_starts, seq_lens, num_seqs, num_tokens, max_len,
                )  # fmt: skip
                following += 1
            next_end = max(next_len - next_stop + min(next_token + queries_per_item, next_stop), 0)
            next_begin = max(0, next_end - window) if window > 0 else 0
            valid = attend_few(
                scratch, q_at, q_token, q_head, out_at, out_token, out_head, k_cache, v_cache, table_row,
                first_position, num_queries, group, head_dim, num_blocks, block_size, block_bytes, head * head_bytes,
                q_factor, window, score_cap,
                table + next_seq * table_stride, next_begin, next_end, next_head * head_bytes,
            )  # fmt: skip
        else:
            valid = attend_item(
                scratch, q_at, q_token, q_head, out_at, out_token, out_head, k_cache, v_cache, table_row,
                first_position, num_queries, group, head_dim, kind, item_bytes, num_blocks, block_size, block_bytes,
                head * head_bytes, rows_capacity, q_factor, window, score_cap,
            )  # fmt: skip
        if not valid:
            bad_seq = max(bad_seq, seq)
        done += 1
        claimed = claim(counter, owner)


ATTEND = attend.address
