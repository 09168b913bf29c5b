"""Attention of few rows, as in decode: K and V stream from the cache into registers. Knows one work item.

A form of `attention.attend_item` with the same sums in the same order, so with the same bits. It needs a bfloat16 cache
whose blocks hold a multiple of KEYS slots, so that KEYS keys lie in one block: a block that has live slots is read
whole, and scores of the others are dropped before anything is computed from them.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import part
from kernels.cpu.softmax import MINUS_INF, ONE, TILE, ZERO, softmax_tile
from kernels.cpu.streaming import (
    COLUMNS,
    KEYS,
    MAX_ROWS,
    accumulate_values,
    score_keys,
    score_two_groups,
    store_bf16_columns,
)
from kernels.cpu.tiles import row_to_float
from kernels.cpu.vectors import (
    BF16,
    LANES,
    load_f32,
    mul,
    read_i32,
    read_i64,
    splat,
    store_f32,
    sum_lanes,
    write_float,
    write_i64,
)


@part
def is_few(num_rows, head_dim, kind, block_size):
    """Whether `attend_few` takes such an item."""
    return num_rows <= MAX_ROWS and kind == BF16 and head_dim % COLUMNS == 0 and block_size % KEYS == 0


@part
def locate_keys(
    offsets, tile_start, begin, end, table_row, head_offset, num_blocks, block_size, block_bytes, row_bytes
):
    """Where in a cache the keys begin .. end - 1 of a tile lie: an int64 offset in bytes per KEYS of them.

    0, in the null block, for those without such a key. False if the block table names a block that the cache lacks.
    """
    valid = True
    for n in range(0, TILE, KEYS):
        offset = 0
        if n < end and n + KEYS > begin:
            position = tile_start + n
            index = position // block_size
            block = int(read_i32(table_row + 4 * index))
            if 0 <= block < num_blocks:
                offset = block * block_bytes + head_offset + (position - index * block_size) * row_bytes
            else:
                valid = False
        write_i64(offsets + 8 * (n // KEYS), offset)
    return valid


@part
def score_tile(num_rows, head_dim, k_cache, here, ahead, lane_begin, lane_end, row_bytes, queries, scores):
    """q · K of lanes lane_begin .. lane_end - 1 into scores [num_rows, TILE]; keys lie at the offsets `here`."""
    nothing = splat(ZERO)
    for row in range(num_rows):
        for n in range(lane_begin, lane_end, LANES):
            store_f32(scores + 4 * (row * TILE + n), nothing)
    for d in range(0, head_dim, COLUMNS):
        n = lane_begin
        while n < lane_end:
            at = 8 * (n // KEYS)
            keys = k_cache + read_i64(here + at) + 2 * d
            keys_ahead = k_cache + read_i64(ahead + at) + 2 * d
            if n + KEYS < lane_end:
                score_two_groups(
                    num_rows, keys, k_cache + read_i64(here + at + 8) + 2 * d, keys_ahead,
                    k_cache + read_i64(ahead + at + 8) + 2 * d, row_bytes, queries + 4 * d, 4 * head_dim,
                    scores + 4 * n, 4 * TILE,
                )  # fmt: skip
                n += 2 * KEYS
            else:
                score_keys(
                    num_rows, keys, keys_ahead, row_bytes, queries + 4 * d, 4 * head_dim, scores + 4 * n, 4 * TILE
                )
                n += KEYS


@part
def weigh_tile(num_rows, head_dim, v_cache, here, ahead, begin, end, row_bytes, weights, result, decays):
    """result = decays * result + weights [num_rows, TILE] · V of tile slots begin .. end - 1."""
    first = begin
    while first < end:
        at = 8 * (first // KEYS)
        stop = min(first // KEYS * KEYS + KEYS, end)
        skipped = first % KEYS * row_bytes
        accumulate_values(
            num_rows, head_dim, v_cache + read_i64(here + at) + skipped, v_cache + read_i64(ahead + at) + skipped,
            row_bytes, weights + 4 * first, 4 * TILE, stop - first, result, 4 * head_dim,
            decays if first == begin else 0,
        )  # fmt: skip
        first = stop


@part
def attend_few(
    scratch, q, q_token, q_head, out, out_token, out_head, k_cache, v_cache, table_row, first_position, num_queries,
    group, head_dim, num_blocks, block_size, block_bytes, head_offset, q_factor, window, score_cap,
    next_table_row, next_begin, next_end, next_head_offset,
):  # fmt: skip
    """As attend_item. Keys next_begin .. next_end - 1 of the next item are fetched meanwhile as far as a tile goes.

    The scores of a tile are computed between the softmax of the tile before it and what that one's weights are for, so
    that the softmax, a long chain of few operations, has independent ones beside it.
    """
    num_rows = num_queries * group
    row_bytes = 2 * head_dim
    wide_bytes = 4 * head_dim
    queries = scratch
    result = queries + num_rows * wide_bytes
    totals = result + num_rows * wide_bytes
    scores = totals + 64 * num_rows
    next_scores = scores + 4 * TILE * num_rows
    here = next_scores + 4 * TILE * num_rows
    ahead = here + 8 * (TILE // KEYS)
    beyond = ahead + 8 * (TILE // KEYS)
    peaks = beyond + 8 * (TILE // KEYS)
    decays = peaks + 4 * num_rows

    nothing = splat(ZERO)
    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            row_to_float(q + i * q_token + g * q_head, queries + row * wide_bytes, head_dim, BF16, q_factor)
            for d in range(0, head_dim, LANES):
                store_f32(result + row * wide_bytes + 4 * d, nothing)
            store_f32(totals + 64 * row, nothing)
            write_float(peaks + 4 * row, MINUS_INF)

    first_key = max(0, first_position - window + 1) if window > 0 else 0
    last_key = first_position + num_queries  # one past it
    first_tile = first_key // TILE * TILE
    next_first_tile = next_begin // TILE * TILE
    valid = locate_keys(
        ahead, first_tile, first_key - first_tile, last_key - first_tile, table_row, head_offset, num_blocks,
        block_size, block_bytes, row_bytes,
    )  # fmt: skip
    tile_start = first_tile - TILE
    while tile_start < last_key:
        begin = max(first_key - tile_start, 0)
        end = min(last_key - tile_start, TILE)
        next_start = tile_start + TILE
        if tile_start >= first_tile:
            softmax_tile(
                scores, begin // LANES * LANES, (end + LANES - 1) // LANES * LANES, begin, end,
                first_position - tile_start, num_queries, group, window, peaks, decays, totals, score_cap,
            )  # fmt: skip
        if next_start < last_key:
            if next_start + TILE < last_key:
                valid &= locate_keys(
                    beyond, next_start + TILE, 0, last_key - next_start - TILE, table_row, head_offset, num_blocks,
                    block_size, block_bytes, row_bytes,
                )  # fmt: skip
            else:
                locate_keys(
                    beyond, next_first_tile, next_begin - next_first_tile, next_end - next_first_tile, next_table_row,
                    next_head_offset, num_blocks, block_size, block_bytes, row_bytes,
                )  # fmt: skip
            score_tile(
                num_rows, head_dim, k_cache, ahead, beyond, max(first_key - next_start, 0) // KEYS * KEYS,
                (min(last_key - next_start, TILE) + KEYS - 1) // KEYS * KEYS, row_bytes, queries, next_scores,
            )  # fmt: skip
        if tile_start >= first_tile:
            weigh_tile(num_rows, head_dim, v_cache, here, ahead, begin, end, row_bytes, scores, result, decays)
        here, ahead, beyond = ahead, beyond, here
        scores, next_scores = next_scores, scores
        tile_start = next_start

    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            total = sum_lanes(load_f32(totals + 64 * row))
            factor = splat(ZERO if total == ZERO else np.float32(ONE / total))
            source = result + row * wide_bytes
            target = out + i * out_token + g * out_head
            for d in range(0, head_dim, COLUMNS):
                even = mul(load_f32(source + 4 * d), factor)
                odd = mul(load_f32(source + 4 * (d + LANES)), factor)
                store_bf16_columns(target + 2 * d, even, odd)
    return valid
