"""The rows of a product as its weights want them: float32, bfloat16 pairs, or quantised to bytes. Knows addresses."""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import part, work
from kernels.cpu.vectors import (
    BF16,
    F32,
    LANES,
    absolute,
    add,
    load_bf16,
    load_f32,
    max_lanes,
    maximum,
    minimum,
    mul,
    read_bf16,
    read_float,
    read_i64,
    splat,
    store_bf16,
    store_bytes,
    store_f32,
    sub,
    sum_lanes,
    write_bf16,
    write_byte,
    write_float,
)

# The arguments, int64 words: addresses, counts, strides in bytes, F32 or BF16.
WORDS = ("x", "x_stride", "kind", "out", "out_stride", "out_kind", "scales", "rows", "size", "terms")
X, X_STRIDE, KIND, OUT, OUT_STRIDE, OUT_KIND, SCALES, ROWS, SIZE, TERMS = range(len(WORDS))

ZERO_POINT = 128
"""What stands for 0 in a quantised row: the products take unsigned bytes."""

_ZERO = np.float32(0)
_MOST = np.float32(127)


@part
def _load(kind, address):
    return load_bf16(address) if kind == BF16 else load_f32(address)


@part
def _read(kind, address):
    return read_bf16(address) if kind == BF16 else read_float(address)


@work
def convert_rows(a, scratch, owner):
    """rows of `size` elements of F32 or BF16 → the other kind, rounded to nearest even. a: address of WORDS."""
    x, x_stride, kind = read_i64(a + 8 * X), read_i64(a + 8 * X_STRIDE), read_i64(a + 8 * KIND)
    out, out_stride, out_kind = read_i64(a + 8 * OUT), read_i64(a + 8 * OUT_STRIDE), read_i64(a + 8 * OUT_KIND)
    rows, size = read_i64(a + 8 * ROWS), read_i64(a + 8 * SIZE)
    width = 2 if kind == BF16 else 4
    out_width = 2 if out_kind == BF16 else 4
    whole = size // LANES * LANES
    for t in range(rows):
        source, target = x + t * x_stride, out + t * out_stride
        for k in range(0, whole, LANES):
            if out_kind == F32:
                store_f32(target + k * out_width, _load(kind, source + k * width))
            else:
                store_bf16(target + k * out_width, _load(kind, source + k * width))
        for k in range(whole, size):
            if out_kind == F32:
                write_float(target + k * out_width, _read(kind, source + k * width))
            else:
                write_bf16(target + k * out_width, _read(kind, source + k * width))
    return 1


@work
def quantise_rows(a, scratch, owner):
    """x[t] ≈ Σ over terms of scales[terms·t + i] · (out[terms·t + i] − 128); out uint8 in 1…255, scales float32.

    One term is half a step of 1/127 of the greatest element at most away; the second term is what the first left over,
    of a row half a step wide. Each row depends on itself alone. a: address of WORDS.
    """
    x, x_stride, kind = read_i64(a + 8 * X), read_i64(a + 8 * X_STRIDE), read_i64(a + 8 * KIND)
    out, out_stride, scales = read_i64(a + 8 * OUT), read_i64(a + 8 * OUT_STRIDE), read_i64(a + 8 * SCALES)
    rows, size, terms = read_i64(a + 8 * ROWS), read_i64(a + 8 * SIZE), read_i64(a + 8 * TERMS)
    width = 2 if kind == BF16 else 4
    whole = size // LANES * LANES
    for t in range(rows):
        source, target = x + t * x_stride, out + terms * t * out_stride
        tops = splat(_ZERO)
        nothing = splat(_ZERO)  # stays 0, or becomes NaN if the row has a NaN or an infinity: then its scale is NaN
        for k in range(0, whole, LANES):
            value = _load(kind, source + k * width)
            tops = maximum(tops, absolute(value))
            nothing = add(nothing, mul(value, splat(_ZERO)))
        most = np.float32(max_lanes(tops) + sum_lanes(nothing))
        for k in range(whole, size):
            value = _read(kind, source + k * width)
            most = np.float32(max(most, np.float32(abs(value))) + value * _ZERO)
        step = np.float32(most / _MOST)
        factor = np.float32(_MOST / most) if most > _ZERO else _ZERO
        finer = np.float32(factor * np.float32(254))
        write_float(scales + 4 * terms * t, step)
        if terms == 2:
            write_float(scales + 4 * (terms * t + 1), np.float32(step / np.float32(254)))
        for k in range(0, whole, LANES):
            value = _load(kind, source + k * width)
            first = store_bytes(target + k, mul(value, splat(factor)))
            if terms == 2:
                left = mul(sub(value, mul(first, splat(step))), splat(finer))
                # at the edge of half a step the rounding of float32 may reach a little beyond
                store_bytes(target + out_stride + k, minimum(maximum(left, splat(-_MOST)), splat(_MOST)))
        for k in range(whole, size):
            value = _read(kind, source + k * width)
            one = write_byte(target + k, np.float32(value * factor))
            if terms == 2:
                rest = np.float32(np.float32(value - np.float32(one * step)) * finer)
                write_byte(target + out_stride + k, min(max(rest, -_MOST), _MOST))
    return 1


CONVERT, QUANTISE = convert_rows.address, quantise_rows.address
