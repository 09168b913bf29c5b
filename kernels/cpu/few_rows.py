"""Attention of few rows, as in decode: K and V stream from the cache into registers. Knows one segment.

A form of `many_rows` with the same sums in the same order, so with the same bits. It needs a bfloat16 cache
whose blocks hold a multiple of KEYS slots, so that KEYS keys lie in one block: a block that has live slots is read
whole, and scores of the others are dropped before anything is computed from them.
"""

from __future__ import annotations

from kernels.cpu.attention_rows import row_addresses
from kernels.cpu.jit import part
from kernels.cpu.matmul import multiply
from kernels.cpu.plan import read_segment
from kernels.cpu.softmax import TILE, ZERO, softmax_tile
from kernels.cpu.streaming import COLUMNS, KEYS, MAX_ROWS, REGISTER_ROWS, accumulate_values, score_keys, transpose_keys
from kernels.cpu.vectors import BF16, LANES, read_i32, read_i64, splat, store_f32, write_i64


@part
def is_few(num_rows, head_dim, kind, block_size):
    """Whether `attend_few` takes such a segment."""
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
def _score_in_registers(
    num_rows, head_dim, first, second, first_ahead, second_ahead, row_bytes, queries, scores
):  # fmt: skip
    """q · K of 2 * KEYS keys, half of them at `first`, for up to REGISTER_ROWS rows."""
    nothing = splat(ZERO)
    for row in range(num_rows):
        store_f32(scores + 4 * TILE * row, nothing)
        store_f32(scores + 4 * (TILE * row + LANES), nothing)
    for byte in range(0, 2 * head_dim, 2 * COLUMNS):
        score_keys(
            num_rows, first + byte, second + byte, first_ahead + byte, second_ahead + byte, row_bytes,
            queries + 2 * byte, 4 * head_dim, scores, 4 * TILE,
        )  # fmt: skip


@part
def score_tile(num_rows, head_dim, k_cache, here, ahead, lane_begin, lane_end, row_bytes, queries, scores, columns):
    """q · K of lanes lane_begin .. lane_end - 1 into scores [num_rows, TILE]; keys lie at the offsets `here`.

    columns: memory for float32 [head_dim, 2 * KEYS], to which K is transposed unless rows are very few.
    """
    for first in range(lane_begin, lane_end, 2 * KEYS):
        stop = min(first + 2 * KEYS, lane_end)
        at = 8 * (first // KEYS)
        if num_rows <= REGISTER_ROWS and stop - first == 2 * KEYS:
            _score_in_registers(
                num_rows, head_dim, k_cache + read_i64(here + at), k_cache + read_i64(here + at + 8),
                k_cache + read_i64(ahead + at), k_cache + read_i64(ahead + at + 8), row_bytes, queries,
                scores + 4 * first,
            )  # fmt: skip
            continue
        for n in range(first, stop, KEYS):
            at = 8 * (n // KEYS)
            transpose_keys(
                k_cache + read_i64(here + at), k_cache + read_i64(ahead + at), row_bytes, head_dim,
                columns + 4 * (n - first), 8 * KEYS,
            )  # fmt: skip
        multiply(
            num_rows, stop - first, queries, 4 * head_dim, columns, 8 * KEYS, scores + 4 * first, 4 * TILE, head_dim, 0
        )


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


def few_bytes(head_dim: int) -> int:
    """Memory to work in: part of K^T, scores of two tiles, three times the offsets of a tile's keys."""
    return 8 * KEYS * head_dim + 8 * TILE * MAX_ROWS + 24 * (TILE // KEYS)


@part
def attend_few(
    rows, workspace, capacity, first_row, segment, next_segment, table, table_stride, k_cache, v_cache, group,
    head_dim, num_blocks, block_size, block_bytes, head_offset, next_head_offset, score_cap,
):  # fmt: skip
    """As attend_many.

    The scores of a tile are computed between the softmax of the tile before it and what that one's weights are for, so
    that the softmax, a long chain of few operations, has independent ones beside it.
    """
    table_row, position, num_queries, begin_key, end_key, window = read_segment(segment, table, table_stride)
    next_table_row, _, _, next_begin, next_end, _ = read_segment(next_segment, table, table_stride)
    num_rows = num_queries * group
    row_bytes = 2 * head_dim
    queries, sums, totals, peaks, decays = row_addresses(rows, capacity, head_dim, first_row)
    columns = workspace
    scores = columns + 8 * KEYS * head_dim
    next_scores = scores + 4 * TILE * num_rows
    here = next_scores + 4 * TILE * num_rows
    ahead = here + 8 * (TILE // KEYS)
    beyond = ahead + 8 * (TILE // KEYS)

    first_tile = begin_key // TILE * TILE
    next_first_tile = next_begin // TILE * TILE
    valid = locate_keys(
        ahead, first_tile, begin_key - first_tile, end_key - first_tile, table_row, head_offset, num_blocks,
        block_size, block_bytes, row_bytes,
    )  # fmt: skip
    tile_start = first_tile - TILE
    while tile_start < end_key:
        begin = max(begin_key - tile_start, 0)
        end = min(end_key - tile_start, TILE)
        next_start = tile_start + TILE
        if tile_start >= first_tile:
            softmax_tile(
                scores, begin // LANES * LANES, (end + LANES - 1) // LANES * LANES, begin, end,
                position - tile_start, num_queries, group, window, peaks, decays, totals, score_cap,
            )  # fmt: skip
        if next_start < end_key:
            if next_start + TILE < end_key:
                valid &= locate_keys(
                    beyond, next_start + TILE, 0, end_key - next_start - TILE, table_row, head_offset, num_blocks,
                    block_size, block_bytes, row_bytes,
                )  # fmt: skip
            else:
                locate_keys(
                    beyond, next_first_tile, next_begin - next_first_tile, next_end - next_first_tile, next_table_row,
                    next_head_offset, num_blocks, block_size, block_bytes, row_bytes,
                )  # fmt: skip
            score_tile(
                num_rows, head_dim, k_cache, ahead, beyond, max(begin_key - next_start, 0) // KEYS * KEYS,
                (min(end_key - next_start, TILE) + KEYS - 1) // KEYS * KEYS, row_bytes, queries, next_scores, columns,
            )  # fmt: skip
        if tile_start >= first_tile:
            weigh_tile(num_rows, head_dim, v_cache, here, ahead, begin, end, row_bytes, scores, sums, decays)
        here, ahead, beyond = ahead, beyond, here
        scores, next_scores = next_scores, scores
        tile_start = next_start
    return valid
