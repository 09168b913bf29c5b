"""Rows of a model's tensors and of the paged cache ↔ dense float32 tiles in scratch memory. Knows no softmax.

Addresses and strides in bytes; `kind` is the element kind in memory (vectors.F32, BF16, F16).
"""

from __future__ import annotations

from kernels.cpu.jit import part
from kernels.cpu.streaming import widen_columns
from kernels.cpu.vectors import (
    BF16,
    F16,
    LANES,
    load_bf16,
    load_f16,
    load_f32,
    mul,
    prefetch,
    read_i32,
    read_i64,
    splat,
    store_bf16,
    store_f16,
    store_f32,
    transpose_bf16,
    transpose_bf16_pairs,
    transpose_f16,
    transpose_f32,
    write_i64,
)

CACHE_LINE = 64


@part
def row_to_float(source, target, head_dim, kind, factor):
    """One row of head_dim elements → float32, times factor (float32)."""
    scale = splat(factor)
    if kind == BF16:
        for d in range(0, head_dim, LANES):
            store_f32(target + 4 * d, mul(load_bf16(source + 2 * d), scale))
    elif kind == F16:
        for d in range(0, head_dim, LANES):
            store_f32(target + 4 * d, mul(load_f16(source + 2 * d), scale))
    else:
        for d in range(0, head_dim, LANES):
            store_f32(target + 4 * d, mul(load_f32(source + 4 * d), scale))


@part
def row_from_float(source, target, head_dim, kind, factor):
    """One float32 row times factor (float32) → head_dim elements of `kind`."""
    scale = splat(factor)
    if kind == BF16:
        for d in range(0, head_dim, LANES):
            store_bf16(target + 2 * d, mul(load_f32(source + 4 * d), scale))
    elif kind == F16:
        for d in range(0, head_dim, LANES):
            store_f16(target + 2 * d, mul(load_f32(source + 4 * d), scale))
    else:
        for d in range(0, head_dim, LANES):
            store_f32(target + 4 * d, mul(load_f32(source + 4 * d), scale))


@part
def locate_rows(
    k_rows, v_rows, first, last, begin, end, tile_start, table_row, k_cache, v_cache, head_offset, zero_row,
    num_blocks, block_size, block_bytes, row_bytes,
):  # fmt: skip
    """Addresses of the K and V rows of tile slots first .. last - 1; slots outside [begin, end) get zero_row.

    So a slot that no live token owns is never read. Slot n holds position tile_start + n. Returns False, having
    written a safe address, if the block table names a block that the cache lacks.
    """
    valid = True
    position = tile_start + begin
    index = position // block_size
    offset = position - index * block_size
    base = 0
    known = False
    for n in range(first, last):
        if n < begin or n >= end:
            write_i64(k_rows + 8 * n, zero_row)
            write_i64(v_rows + 8 * n, zero_row)
            continue
        if not known:
            block = int(read_i32(table_row + 4 * index))  # int64 from here on: block * block_bytes passes 2^31
            if block < 0 or block >= num_blocks:
                valid = False
                block = 0
            base = block * block_bytes + head_offset
            known = True
        byte = base + offset * row_bytes
        write_i64(k_rows + 8 * n, k_cache + byte)
        write_i64(v_rows + 8 * n, v_cache + byte)
        offset += 1
        if offset == block_size:
            offset = 0
            index += 1
            known = False
    return valid


@part
def prefetch_rows(begin, end, table_row, k_cache, v_cache, head_offset, num_blocks, block_size, block_bytes, row_bytes):
    """Bring the K and V rows of positions begin .. end - 1 nearer, while the tile before them is computed."""
    for index in range(begin // block_size, (end + block_size - 1) // block_size):
        block = int(read_i32(table_row + 4 * index))
        if 0 <= block < num_blocks:
            base = block * block_bytes + head_offset
            for byte in range(base, base + block_size * row_bytes, CACHE_LINE):
                prefetch(k_cache + byte)
                prefetch(v_cache + byte)


@part
def gather_keys_transposed(rows, target, target_stride, first, last, head_dim, kind):
    """K rows of tile slots first .. last - 1 (multiples of 16) → columns of float32 [head_dim, tile]."""
    for n in range(first, last, LANES):
        table = rows + 8 * n
        column = target + 4 * n
        if kind == BF16:
            d = 0
            while d + 2 * LANES <= head_dim:
                transpose_bf16_pairs(table, 2 * d, column + d * target_stride, target_stride)
                d += 2 * LANES
            if d < head_dim:
                transpose_bf16(table, 2 * d, column + d * target_stride, target_stride)
        elif kind == F16:
            for d in range(0, head_dim, LANES):
                transpose_f16(table, 2 * d, column + d * target_stride, target_stride)
        else:
            for d in range(0, head_dim, LANES):
                transpose_f32(table, 4 * d, column + d * target_stride, target_stride)


@part
def gather_values(rows, target, begin, end, head_dim, kind):
    """V rows of tile slots begin .. end - 1 → float32 [tile, head_dim] rows of the same number.

    Of each whole 32 bfloat16, the even columns come before the odd ones.
    """
    for n in range(begin, end):
        source = read_i64(rows + 8 * n)
        row = target + n * (4 * head_dim)
        if kind == BF16:
            d = 0
            while d + 2 * LANES <= head_dim:
                widen_columns(source + 2 * d, row + 4 * d)
                d += 2 * LANES
            if d < head_dim:
                store_f32(row + 4 * d, load_bf16(source + 2 * d))
        elif kind == F16:
            for d in range(0, head_dim, LANES):
                store_f32(row + 4 * d, load_f16(source + 2 * d))
        else:
            for d in range(0, head_dim, LANES):
                store_f32(row + 4 * d, load_f32(source + 4 * d))
