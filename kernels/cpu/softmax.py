"""Online softmax over tiles of scores (Milakov and Gimelshein 2018): scores become weights in place. Knows no cache.

Per row there are a running peak, the sum of weights so far in 16 lanes, and the decay: the factor by which what was
summed before this tile must shrink since the peak has risen. All float32; scores are times log2(e), for exp2.

softmax_row takes one row of which only a part may be visible, softmax_rows sixteen that see all of a tile. Their
arithmetic on a row is the same to the bit: lanes that a row does not see weigh 0, and adding 0 changes nothing.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import part
from kernels.cpu.vectors import (
    LANES,
    add,
    exp2,
    first,
    keep_lanes,
    load_f32,
    max_lanes,
    max_of_rows,
    maximum,
    mul,
    read_float,
    splat,
    store_f32,
    sub,
    tanh_half,
    write_float,
)

TILE = 64  # keys
VECTORS = TILE // LANES
MINUS_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@part
def cap_scores(scores, begin, end, score_cap):
    """Scores of lanes [begin, end) of a row → score_cap * tanh_half(score)."""
    cap = splat(score_cap)
    for n in range(begin, end, LANES):
        store_f32(scores + 4 * n, mul(cap, tanh_half(load_f32(scores + 4 * n))))


@part
def softmax_row(scores, begin, end, low, high, peak, decay, total, score_cap):
    """One row. Lanes of [begin, end), multiples of 16, are there; the row sees those of [low, high).

    What stands in the other lanes does not matter, even NaN; they become 0. total: address of 16 numbers.
    """
    nothing = splat(ZERO)
    if low >= high:
        for n in range(begin, end, LANES):
            store_f32(scores + 4 * n, nothing)
        write_float(decay, ONE)
        return
    first_lane = low // LANES * LANES
    for n in range(begin, first_lane, LANES):
        store_f32(scores + 4 * n, nothing)
    last_lane = (high + LANES - 1) // LANES * LANES
    for n in range(last_lane, end, LANES):
        store_f32(scores + 4 * n, nothing)
    if score_cap > ZERO:
        cap_scores(scores, first_lane, last_lane, score_cap)
    tops = splat(MINUS_INF)
    for n in range(first_lane, last_lane, LANES):
        visible = load_f32(scores + 4 * n)
        if n < low or n + LANES > high:
            visible = keep_lanes(visible, low - n, high - n, MINUS_INF)
            store_f32(scores + 4 * n, visible)
        tops = maximum(tops, visible)
    old_peak = read_float(peak)
    new_peak = max(old_peak, max_lanes(tops))
    level = splat(new_peak)
    factor = exp2(sub(splat(old_peak), level))
    write_float(peak, new_peak)
    write_float(decay, first(factor))
    sums = nothing
    for n in range(first_lane, last_lane, LANES):
        weights = exp2(sub(load_f32(scores + 4 * n), level))
        store_f32(scores + 4 * n, weights)
        sums = add(sums, weights)
    store_f32(total, add(mul(load_f32(total), factor), sums))


@part
def softmax_whole_row(scores, peak, decay, total):
    """One row of TILE scores, all visible."""
    tops = load_f32(scores)
    for n in range(LANES, TILE, LANES):
        tops = maximum(tops, load_f32(scores + 4 * n))
    old_peak = read_float(peak)
    new_peak = max(old_peak, max_lanes(tops))
    level = splat(new_peak)
    factor = exp2(sub(splat(old_peak), level))
    write_float(peak, new_peak)
    write_float(decay, first(factor))
    sums = splat(ZERO)
    for n in range(0, TILE, LANES):
        weights = exp2(sub(load_f32(scores + 4 * n), level))
        store_f32(scores + 4 * n, weights)
        sums = add(sums, weights)
    store_f32(total, add(mul(load_f32(total), factor), sums))


@part
def softmax_rows(scores, scores_stride, peaks, decays, totals):
    """Sixteen rows of TILE scores, all visible. Per row: a peak, a decay, 16 numbers of totals."""
    old_peaks = load_f32(peaks)
    new_peaks = maximum(old_peaks, max_of_rows(scores, scores_stride, VECTORS))
    store_f32(peaks, new_peaks)
    store_f32(decays, exp2(sub(old_peaks, new_peaks)))
    for r in range(LANES):
        row = scores + r * scores_stride
        level = splat(read_float(peaks + 4 * r))
        sums = splat(ZERO)
        for n in range(0, TILE, LANES):
            weights = exp2(sub(load_f32(row + 4 * n), level))
            store_f32(row + 4 * n, weights)
            sums = add(sums, weights)
        total = totals + 64 * r
        store_f32(total, add(mul(load_f32(total), splat(read_float(decays + 4 * r))), sums))


@part
def softmax_tile(
    scores, lane_begin, lane_end, begin, end, first_position, num_queries, group, window, peaks, decays, totals,
    score_cap,
):  # fmt: skip
    """All rows of a tile: `group` to each of num_queries, of which the first stands at first_position of the tile.

    Slots begin .. end - 1 have keys, in lanes lane_begin .. lane_end - 1.
    """
    num_rows = num_queries * group
    row = 0
    if end - begin == TILE and first_position >= TILE - 1 and (window == 0 or first_position + num_queries <= window):
        while row + LANES <= num_rows:
            if score_cap > ZERO:
                for r in range(row, row + LANES):
                    cap_scores(scores + 4 * TILE * r, 0, TILE, score_cap)
            softmax_rows(scores + 4 * TILE * row, 4 * TILE, peaks + 4 * row, decays + 4 * row, totals + 64 * row)
            row += LANES
        while row < num_rows:
            if score_cap > ZERO:
                cap_scores(scores + 4 * TILE * row, 0, TILE, score_cap)
            softmax_whole_row(scores + 4 * TILE * row, peaks + 4 * row, decays + 4 * row, totals + 64 * row)
            row += 1
    for r in range(row, num_rows):
        position = first_position + r // group
        low = max(begin, position - window + 1) if window > 0 else begin
        high = min(end, position + 1)
        softmax_row(
            scores + 4 * TILE * r, lane_begin, lane_end, low, high, peaks + 4 * r, decays + 4 * r, totals + 64 * r,
            score_cap,
        )  # fmt: skip
