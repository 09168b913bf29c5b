"""Attention of many rows, as in prefill: tiles of K and V are widened into scratch memory. Knows one segment.

scores = q K^T           (K gathered through the block table, transposed, widened to float32)
softmax, online          (running maximum and sum per row)
sums = decay * sums + weights V
"""

from __future__ import annotations

from kernels.cpu.attention_rows import row_addresses
from kernels.cpu.jit import part
from kernels.cpu.matmul import multiply
from kernels.cpu.plan import read_segment
from kernels.cpu.softmax import TILE, ZERO, softmax_tile
from kernels.cpu.tiles import gather_keys_transposed, gather_values, locate_rows, prefetch_rows
from kernels.cpu.vectors import LANES, splat, store_f32


def many_bytes(capacity: int, head_dim: int) -> int:
    """Memory to work in: scores, K^T, V, a zero row, two addresses a key."""
    return 4 * (capacity * TILE + 2 * TILE * head_dim + head_dim) + 16 * TILE


@part
def attend_many(
    rows, workspace, capacity, first_row, segment, next_segment, table, table_stride, k_cache, v_cache, group,
    head_dim, kind, item_bytes, num_blocks, block_size, block_bytes, head_offset, next_head_offset, score_cap,
):  # fmt: skip
    """A segment's keys for its rows, of which the first is `first_row` of the item's, in the memory `rows`.

    Of the next segment's keys, those of the first tile are brought nearer meanwhile. False if the block table names a
    block that the cache lacks.
    """
    table_row, position, num_queries, begin_key, end_key, window = read_segment(segment, table, table_stride)
    next_table_row, _, _, next_begin, next_end, _ = read_segment(next_segment, table, table_stride)
    row_bytes = 4 * head_dim
    tile_bytes = 4 * TILE
    num_rows = num_queries * group
    queries, sums, totals, peaks, decays = row_addresses(rows, capacity, head_dim, first_row)
    scores = workspace
    keys = scores + capacity * tile_bytes
    values = keys + TILE * row_bytes
    zero_row = values + TILE * row_bytes
    k_rows = zero_row + row_bytes
    v_rows = k_rows + 8 * TILE
    for d in range(0, head_dim, LANES):
        store_f32(zero_row + 4 * d, splat(ZERO))

    valid = True
    for tile_start in range(begin_key // TILE * TILE, end_key, TILE):
        begin = max(begin_key - tile_start, 0)
        end = min(end_key - tile_start, TILE)
        lane_begin = begin // LANES * LANES
        lane_end = (end + LANES - 1) // LANES * LANES
        valid &= locate_rows(
            k_rows, v_rows, lane_begin, lane_end, begin, end, tile_start, table_row, k_cache, v_cache, head_offset,
            zero_row, num_blocks, block_size, block_bytes, item_bytes * head_dim,
        )  # fmt: skip
        if tile_start + TILE < end_key:
            prefetch_rows(
                tile_start + TILE, min(tile_start + 2 * TILE, end_key), table_row, k_cache, v_cache, head_offset,
                num_blocks, block_size, block_bytes, item_bytes * head_dim,
            )  # fmt: skip
        else:
            prefetch_rows(
                next_begin, min(next_begin // TILE * TILE + TILE, next_end), next_table_row, k_cache, v_cache,
                next_head_offset, num_blocks, block_size, block_bytes, item_bytes * head_dim,
            )  # fmt: skip
        gather_keys_transposed(k_rows, keys, tile_bytes, lane_begin, lane_end, head_dim, kind)
        gather_values(v_rows, values, begin, end, head_dim, kind)
        multiply(
            num_rows, lane_end - lane_begin, queries, row_bytes, keys + 4 * lane_begin, tile_bytes,
            scores + 4 * lane_begin, tile_bytes, head_dim, 0,
        )  # fmt: skip
        softmax_tile(
            scores, lane_begin, lane_end, begin, end, position - tile_start, num_queries, group, window,
            peaks, decays, totals, score_cap,
        )  # fmt: skip
        multiply(
            num_rows, head_dim, scores + 4 * begin, tile_bytes, values + begin * row_bytes, row_bytes,
            sums, row_bytes, end - begin, decays,
        )  # fmt: skip
    return valid
