"""The rows of a work item, in scratch memory: their queries, and the sums of the part of their keys seen so far.

All float32. Both forms of attention, `many_rows` and `few_rows`, go on from what the other left. The sums over bfloat16
V have the even columns of each whole 32 before the odd ones.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import part
from kernels.cpu.softmax import MINUS_INF, ONE, ZERO
from kernels.cpu.streaming import COLUMNS, store_bf16_columns
from kernels.cpu.tiles import row_from_float, row_to_float
from kernels.cpu.vectors import BF16, LANES, load_f32, mul, read_i64, splat, store_f32, sum_lanes, write_float


@part
def row_bytes(head_dim):
    """Memory of a row."""
    return 4 * (2 * head_dim + LANES + 2)


@part
def row_addresses(memory, capacity, head_dim, row):
    """Of one row and those after it: queries, sums, weights in total (16 lanes), peaks, decays."""
    sums = memory + 4 * capacity * head_dim
    totals = sums + 4 * capacity * head_dim
    peaks = totals + 64 * capacity
    wide_bytes = row * 4 * head_dim
    return (
        memory + wide_bytes, sums + wide_bytes, totals + 64 * row, peaks + 4 * row, peaks + 4 * (capacity + row),
    )  # fmt: skip


@part
def begin_rows(memory, capacity, q, q_token, q_head, tokens, num_queries, group, head_dim, kind, q_factor):
    """`group` rows to each of the tokens in a list of int64; q: address of the first query head of token 0."""
    nothing = splat(ZERO)
    for i in range(num_queries):
        source = q + read_i64(tokens + 8 * i) * q_token
        for g in range(group):
            queries, sums, total, peak, _ = row_addresses(memory, capacity, head_dim, i * group + g)
            row_to_float(source + g * q_head, queries, head_dim, kind, q_factor)
            for d in range(0, head_dim, LANES):
                store_f32(sums + 4 * d, nothing)
            store_f32(total, nothing)
            write_float(peak, MINUS_INF)


@part
def finish_rows(memory, capacity, out, out_token, out_head, tokens, num_queries, group, head_dim, kind):
    """The results: sums divided by the weights in total, or 0 where no key was seen."""
    for i in range(num_queries):
        target = out + read_i64(tokens + 8 * i) * out_token
        for g in range(group):
            _, sums, totals, _, _ = row_addresses(memory, capacity, head_dim, i * group + g)
            total = sum_lanes(load_f32(totals))
            factor = ZERO if total == ZERO else np.float32(ONE / total)
            whole = head_dim // COLUMNS * COLUMNS if kind == BF16 else 0
            for d in range(0, whole, COLUMNS):
                even = mul(load_f32(sums + 4 * d), splat(factor))
                odd = mul(load_f32(sums + 4 * (d + LANES)), splat(factor))
                store_bf16_columns(target + 2 * d, even, odd)
            row_from_float(sums + 4 * whole, target + 2 * whole, head_dim - whole, kind, factor)
            target += out_head
