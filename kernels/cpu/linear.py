"""Rows times packed weights, with what follows done on the block that is still in the cache. Knows addresses.

One piece of work for a `team.Team`. An item is (up to CHUNK rows, one panel of 48 outputs): its products go to a tile
in the thread's scratch memory, and from there, rounded once, to
    STORE   out = product + bias, float32 or bfloat16
    ADD     out += product + bias, out float32: the residual stream
    GATE    out = silu(gate) · up, float32 or bfloat16: gate and up are neighbouring panels (SwiGLU, Shazeer 2020)
Each sum over k has one order whoever computes it and with whatever rows (`products`).
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.features import HAS_AVX512, HAS_BF16_DOTS
from kernels.cpu.jit import part, work
from kernels.cpu.products import BYTES, DOTS, PAIRS, SINGLE, VECTOR_BYTES, multiply_packed
from kernels.cpu.team import claim
from kernels.cpu.vectors import (
    BF16,
    LANES,
    add,
    divide,
    exp2,
    load_f32,
    load_i32_difference,
    maximum,
    mul,
    read_float,
    read_i64,
    splat,
    store_bf16,
    store_f32,
    sub,
    write_bf16,
    write_float,
)

PANEL_VECTORS, BLOCK = (3, 8) if HAS_AVX512 else (1, 6)  # accumulators of a block that fit into the registers
PANEL = PANEL_VECTORS * LANES  # outputs
CHUNK = 16 * BLOCK  # rows
TILE_BYTES = (CHUNK + BLOCK) * PANEL * 4
SCRATCH_BYTES = 2 * TILE_BYTES

STORE, ADD, GATE = 0, 1, 2

# The arguments, int64 words: addresses, counts, strides in bytes.
WORDS = (
    "counter",  # items that were claimed; the caller sets it to 0
    "form",  # of the weights, `products`
    "action",  # STORE, ADD, GATE
    "weight",  # as `packing` lays it out
    "following",  # weights that are probably multiplied next, or these
    "panels",  # P; of GATE the pairs of panels
    "steps",  # 64-byte vectors of depth
    "outputs",  # columns of out
    "bias",  # float32 [P * 48] or 0
    "scales",  # BYTES: float32 [P * 48], of the outputs
    "zeros",  # BYTES: int32 [P * 48]: what the zero point of the rows adds to a product
    "terms",  # BYTES: rows of x to a row of out, whose sum it is
    "x",
    "x_stride",
    "row_scales",  # BYTES: float32 [terms * rows]
    "rows",  # of out
    "out",
    "out_stride",
    "out_kind",  # F32 or BF16 (`vectors`)
)
COUNTER, FORM, ACTION, WEIGHT, FOLLOWING, PANELS, STEPS, OUTPUTS, BIAS, SCALES, ZEROS, TERMS, X, X_STRIDE, ROW_SCALES, ROWS, OUT, OUT_STRIDE, OUT_KIND = range(len(WORDS))  # fmt: skip  # noqa: E501
_LOG2E = np.float32(1.4426950408889634)


@part
def _multiply(form, rows, x, x_stride, w, tile, steps, fetch, unit):
    """Up to BLOCK rows times one panel → rows of the tile."""
    if form == PAIRS:
        multiply_packed(PAIRS, PANEL_VECTORS, BLOCK, rows, x, x_stride, w, tile, PANEL * 4, steps, fetch, unit)
    elif form == SINGLE:
        multiply_packed(SINGLE, PANEL_VECTORS, BLOCK, rows, x, x_stride, w, tile, PANEL * 4, steps, fetch, unit)
    elif form == BYTES:
        multiply_packed(BYTES, PANEL_VECTORS, BLOCK, rows, x, x_stride, w, tile, PANEL * 4, steps, fetch, unit)
    elif HAS_BF16_DOTS and form == DOTS:
        multiply_packed(DOTS, PANEL_VECTORS, BLOCK, rows, x, x_stride, w, tile, PANEL * 4, steps, fetch, unit)


@part
def _panel_products(a, panel, first, rows, tile, fetch):
    """`rows` rows of x from `first` on (rows of out, times terms) times a panel → float32 tile [rows of out, 48].

    What came of BYTES is scaled, and the terms of a row are summed. fetch: address of the panel that comes next, which
    is brought nearer meanwhile.
    """
    form = read_i64(a + 8 * FORM)
    steps = read_i64(a + 8 * STEPS)
    terms = read_i64(a + 8 * TERMS)
    x_stride = read_i64(a + 8 * X_STRIDE)
    x = read_i64(a + 8 * X) + first * terms * x_stride
    w = read_i64(a + 8 * WEIGHT) + panel * steps * (PANEL * 4)
    row_scales = read_i64(a + 8 * ROW_SCALES) + first * terms * 4
    column = panel * (PANEL * 4)
    zeros = read_i64(a + 8 * ZEROS) + column
    scales = read_i64(a + 8 * SCALES) + column
    bias = read_i64(a + 8 * BIAS)
    tokens = BLOCK // terms
    unit = max(1, VECTOR_BYTES // ((rows + tokens - 1) // tokens))  # so all blocks of rows together fetch about a panel
    for row in range(0, rows, tokens):
        count = min(tokens, rows - row)
        # the terms of a block lie below its place: it is overwritten by fewer rows, or as many
        target = tile + row * (PANEL * 4)
        _multiply(form, count * terms, x + row * terms * x_stride, x_stride, w, target, steps, fetch, unit)
        fetch += steps * PANEL_VECTORS * unit
        if form == BYTES:
            for r in range(count):
                for n in range(0, PANEL * 4, LANES * 4):
                    source = target + r * terms * (PANEL * 4) + n
                    total = mul(
                        load_i32_difference(source, zeros + n), splat(read_float(row_scales + 4 * terms * (row + r)))
                    )
                    if terms == 2:
                        second = load_i32_difference(source + PANEL * 4, zeros + n)
                        finer = splat(read_float(row_scales + 4 * (terms * (row + r) + 1)))
                        total = add(total, mul(second, finer))
                    store_f32(target + r * (PANEL * 4) + n, mul(total, load_f32(scales + n)))
        if bias != 0:
            for r in range(count):
                for n in range(0, PANEL * 4, LANES * 4):
                    store_f32(
                        target + r * (PANEL * 4) + n,
                        add(load_f32(target + r * (PANEL * 4) + n), load_f32(bias + column + n)),
                    )


@part
def _gate(gate, up, rows):
    """gate[r, :] = silu(gate[r, :]) * up[r, :], float32 tiles; silu(g) = g / (1 + e^-g)."""
    for at in range(0, rows * PANEL * 4, LANES * 4):
        g = load_f32(gate + at)
        power = exp2(sub(splat(np.float32(0)), maximum(splat(np.float32(-126)), mul(g, splat(_LOG2E)))))
        result = mul(divide(g, add(splat(np.float32(1)), power)), load_f32(up + at))
        store_f32(gate + at, result)


@part
def _put(a, tile, panel, first, rows):
    """The tile to its place in out. Columns beyond `outputs` are left alone."""
    out_kind = read_i64(a + 8 * OUT_KIND)
    out_stride = read_i64(a + 8 * OUT_STRIDE)
    size = 2 if out_kind == BF16 else 4
    column = panel * PANEL
    adds = read_i64(a + 8 * ACTION) == ADD
    width = min(PANEL, read_i64(a + 8 * OUTPUTS) - column)
    whole = width // LANES * LANES
    for r in range(rows):
        source = tile + r * (PANEL * 4)
        target = read_i64(a + 8 * OUT) + (first + r) * out_stride + column * size
        for n in range(0, whole, LANES):
            value = load_f32(source + 4 * n)
            if out_kind == BF16:
                store_bf16(target + 2 * n, value)
            elif adds:
                store_f32(target + 4 * n, add(load_f32(target + 4 * n), value))
            else:
                store_f32(target + 4 * n, value)
        for n in range(whole, width):
            value = read_float(source + 4 * n)
            if out_kind == BF16:
                write_bf16(target + 2 * n, value)
            elif adds:
                write_float(target + 4 * n, np.float32(read_float(target + 4 * n) + value))
            else:
                write_float(target + 4 * n, value)


@work
def linear(a, scratch, owner):
    """a: address of WORDS; owner: of the core, see `team`."""
    rows = read_i64(a + 8 * ROWS)
    panels = read_i64(a + 8 * PANELS)
    gates = read_i64(a + 8 * ACTION) == GATE
    counter = a + 8 * COUNTER
    items = (rows + CHUNK - 1) // CHUNK * panels
    panel_bytes = read_i64(a + 8 * STEPS) * (PANEL * 4) * (2 if gates else 1)
    done = 0
    item = claim(counter, owner)
    while item < items:
        chunk = item // panels
        panel = item - chunk * panels
        first = chunk * CHUNK
        count = min(CHUNK, rows - first)
        item = claim(counter, owner)
        if item < items:
            fetch = read_i64(a + 8 * WEIGHT) + item % panels * panel_bytes
        else:
            fetch = read_i64(a + 8 * FOLLOWING) + (item - items) % panels * panel_bytes
        if gates:
            _panel_products(a, 2 * panel, first, count, scratch, fetch)
            _panel_products(a, 2 * panel + 1, first, count, scratch + TILE_BYTES, fetch + panel_bytes // 2)
            _gate(scratch, scratch + TILE_BYTES, count)
        else:
            _panel_products(a, panel, first, count, scratch, fetch)
        _put(a, scratch, panel, first, count)
        done += 1
    return done


LINEAR = linear.address
