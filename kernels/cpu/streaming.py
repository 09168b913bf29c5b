"""A few rows against sixteen or more keys of a bfloat16 cache, which stream into registers. Knows no softmax.

With very few rows, writing a widened K to scratch memory and reading it back costs more than the products. So it is
transposed in registers, where each column is multiplied at once; with more rows, 32 keys at a time are written. V is
widened on its way into the sums, for six rows at a time. Two bfloat16 lie in 32 bits, of which the upper half alone is
the float32 of the odd column, and the lower half, shifted up, that of the even one; hence sums over V have their even
and odd columns apart until they are stored.

The order of sums is that of `vectors.multiply_block`, so results are the same to the bit.

Each line read is matched by a prefetch of the same line of the rows at `ahead`, which are wanted next: spread out, they
don't fill up the few buffers that a core has for lines on their way.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from kernels.cpu import vectors as emit
from kernels.cpu.features import HAS_AVX512
from kernels.cpu.jit import part
from kernels.cpu.vectors import LANES, float32x16, intrinsic

KEYS = 16  # that score_keys takes at once
COLUMNS = 32  # of bfloat16, 64 bytes, a line
REGISTER_ROWS = 4  # whose sums fit into registers beside two transpositions
ROW_BLOCK = 6  # rows whose sums over 64 columns of V do
MAX_ROWS = 24 if HAS_AVX512 else 0
"""Rows from which on a copy of V pays. Where registers are smaller, none is taken this way."""

_i64 = ir.IntType(64)


def _at(builder: Any, address: Any, stride: Any, count: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(_i64, count)))


def _load_bits(builder: Any, address: Any) -> Any:
    return builder.load(emit._pointer(builder, address, emit._i32x16), align=2)


def _even_and_odd(builder: Any, bits: Any) -> tuple[Any, Any]:
    """Of 32 bfloat16 as 16 int32: the even ones and the odd ones, float32."""
    even = builder.shl(bits, emit._splat(16, emit._i32))
    odd = builder.and_(bits, emit._splat(0xFFFF0000, emit._i32))
    return builder.bitcast(even, emit._f32x16), builder.bitcast(odd, emit._f32x16)


def _read_splat(builder: Any, address: Any) -> Any:
    return emit._broadcast(builder, builder.load(emit._pointer(builder, address, emit._float)))


def _literal(*numbers: Any) -> bool:
    return all(isinstance(number, types.IntegerLiteral) for number in numbers)


@intrinsic
def _transpose_keys(typingctx, keys, ahead, key_bytes, target, target_stride):
    """target[c, 0..15] = keys[0..15, c] for 32 columns, float32."""

    def codegen(context, builder, signature, args):
        keys, ahead, key_bytes, target, target_stride = args
        loaded = [_load_bits(builder, _at(builder, keys, key_bytes, i)) for i in range(KEYS)]
        for pair, bits in enumerate(emit._transpose(builder, loaded)):
            emit._prefetch(builder, _at(builder, ahead, key_bytes, pair), near=True)
            for vector in _even_and_odd(builder, bits):
                emit._store_f32(builder, target, vector)
                target = builder.add(target, target_stride)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _columns_of_half(builder: Any, keys: Any, key_bytes: Any) -> list[Any]:
    """Sixteen keys' next sixteen columns, float32: half as many registers as the transposition of 32."""
    half = ir.VectorType(emit._i32, LANES // 2)
    rows = [builder.load(emit._pointer(builder, _at(builder, keys, key_bytes, i), half), align=2) for i in range(KEYS)]
    both = ir.Constant(emit._i32x16, list(range(LANES)))
    joined = [builder.shuffle_vector(rows[i], rows[i + 4], both) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    columns: list[Any] = []
    for bits in emit._transpose_joined(builder, joined):
        columns += _even_and_odd(builder, bits)
    return columns


@intrinsic
def _score(typingctx, rows, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride):
    """scores[r, 0..15] += q[r, 0..31] · keys[0..15, 0..31] for the keys at `first` and, into scores[r, 16..31], for
    those at `second`, half of the columns first. `rows` is a constant.

    A sum waits four cycles for the one before it, so with few rows, one group alone leaves the multipliers idle.
    """
    if not _literal(rows):
        return None
    num_rows = rows.literal_value

    def codegen(context, builder, signature, args):
        _, *addresses, key_bytes, q, q_stride, scores, scores_stride = args
        starts, aheads = addresses[:2], addresses[2:]
        lines = [_at(builder, ahead, key_bytes, i) for ahead in aheads for i in range(KEYS)]
        cells = [(r, group) for r in range(num_rows) for group in range(2)]
        targets = {
            (r, group): emit._offset(builder, _at(builder, scores, scores_stride, r), 64 * group) for r, group in cells
        }
        q_rows = [_at(builder, q, q_stride, r) for r in range(num_rows)]
        sums = {cell: emit._load_f32(builder, targets[cell]) for cell in cells}
        for half in range(2):
            columns = [
                _columns_of_half(builder, emit._offset(builder, start, 32 * half), key_bytes) for start in starts
            ]
            for column in range(LANES):
                emit._prefetch(builder, lines[LANES * half + column], near=True)
                for r in range(num_rows):
                    element = _read_splat(builder, emit._offset(builder, q_rows[r], 4 * (LANES * half + column)))
                    for group in range(2):
                        sums[r, group] = emit._fma(builder, element, columns[group][column], sums[r, group])
        for cell in cells:
            emit._store_f32(builder, targets[cell], sums[cell])
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 9), codegen


@intrinsic
def _accumulate(
    typingctx, rows, chunks, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays
):
    """sums[r, :] = decays[r] * sums[r, :] + sum over k < count of weights[r, k] * values[k, :].

    `rows` and `chunks`, of 32 columns, are constants. In sums, the even columns of a chunk precede its odd ones. With
    decays 0 (no address), nothing is scaled.
    """
    if not _literal(rows, chunks):
        return None
    num_rows, num_chunks = rows.literal_value, chunks.literal_value

    def codegen(context, builder, signature, args):
        _, _, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays = args
        zero = ir.Constant(_i64, 0)
        cells = [(r, v) for r in range(num_rows) for v in range(2 * num_chunks)]
        weight_rows = [_at(builder, weights, weights_stride, r) for r in range(num_rows)]
        places = {(r, v): emit._offset(builder, _at(builder, sums, sums_stride, r), 64 * v) for r, v in cells}
        old = {cell: emit._load_f32(builder, places[cell]) for cell in cells}
        entry = builder.block
        decayed = builder.append_basic_block("decayed")
        head = builder.append_basic_block("head")
        body = builder.append_basic_block("body")
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("==", decays, zero), head, decayed)

        builder.position_at_end(decayed)
        factors = [_read_splat(builder, emit._offset(builder, decays, 4 * r)) for r in range(num_rows)]
        scaled = {(r, v): builder.fmul(old[r, v], factors[r]) for r, v in cells}
        builder.branch(head)

        builder.position_at_end(head)
        k, row, row_ahead = (builder.phi(_i64) for _ in range(3))
        totals = {cell: builder.phi(emit._f32x16) for cell in cells}
        for block, start in ((entry, old), (decayed, scaled)):
            for phi, value in ((k, zero), (row, values), (row_ahead, ahead)):
                phi.add_incoming(value, block)
            for cell in cells:
                totals[cell].add_incoming(start[cell], block)
        builder.cbranch(builder.icmp_signed("<", k, count), body, done)

        builder.position_at_end(body)
        vectors: list[Any] = []
        for chunk in range(num_chunks):
            vectors += _even_and_odd(builder, _load_bits(builder, emit._offset(builder, row, 64 * chunk)))
            emit._prefetch(builder, emit._offset(builder, row_ahead, 64 * chunk), near=True)
        byte = builder.shl(k, ir.Constant(_i64, 2))
        for r in range(num_rows):
            weight = _read_splat(builder, builder.add(weight_rows[r], byte))
            for v, vector in enumerate(vectors):
                totals[r, v].add_incoming(emit._fma(builder, weight, vector, totals[r, v]), body)
        k.add_incoming(builder.add(k, ir.Constant(_i64, 1)), body)
        row.add_incoming(builder.add(row, value_bytes), body)
        row_ahead.add_incoming(builder.add(row_ahead, value_bytes), body)
        builder.branch(head)

        builder.position_at_end(done)
        for cell in cells:
            emit._store_f32(builder, places[cell], totals[cell])
        return context.get_dummy_value()

    return types.void(rows, chunks, *[types.int64] * 9), codegen


@intrinsic
def widen_columns(typingctx, source, target):
    """32 bfloat16 → float32, the even columns before the odd ones."""

    def codegen(context, builder, signature, args):
        source, target = args
        even, odd = _even_and_odd(builder, _load_bits(builder, source))
        emit._store_f32(builder, target, even)
        emit._store_f32(builder, emit._offset(builder, target, 64), odd)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_bf16_columns(typingctx, target, even, odd):
    """32 bfloat16, rounded to nearest even, from their even and odd columns."""

    def codegen(context, builder, signature, args):
        target, even, odd = args
        low = builder.lshr(emit._round_bf16(builder, even), emit._splat(16, emit._i32))
        high = builder.and_(emit._round_bf16(builder, odd), emit._splat(0xFFFF0000, emit._i32))
        pointer = emit._pointer(builder, target, emit._i32x16)
        builder.store(builder.or_(low, high), pointer, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, float32x16, float32x16), codegen


@part
def score_keys(rows, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride):
    """scores[r, n] += q[r, 0..31] · key n[0..31] for `rows` (1 to 4) rows and 32 keys, of which 16 lie at `first`.

    keys: bfloat16, key_bytes from key to key; q and scores: float32. Strides in bytes.
    """
    if rows == 1:
        _score(1, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride)
    elif rows == 2:
        _score(2, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride)
    elif rows == 3:
        _score(3, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride)
    else:
        _score(4, first, second, first_ahead, second_ahead, key_bytes, q, q_stride, scores, scores_stride)


@part
def transpose_keys(keys, ahead, key_bytes, head_dim, target, target_stride):
    """target[c, 0..15] = keys[0..15, c], float32, for all head_dim columns."""
    for d in range(0, head_dim, COLUMNS):
        _transpose_keys(keys + 2 * d, ahead + 2 * d, key_bytes, target + d * target_stride, target_stride)


@part
def _accumulate_wide(
    rows, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays,
):  # fmt: skip
    if rows == 1:
        _accumulate(1, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)
    elif rows == 2:
        _accumulate(2, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)
    elif rows == 3:
        _accumulate(3, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)
    elif rows == 4:
        _accumulate(4, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)
    elif rows == 5:
        _accumulate(5, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)
    else:
        _accumulate(6, 2, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays)


@part
def accumulate_values(
    rows, head_dim, values, ahead, value_bytes, weights, weights_stride, count, sums, sums_stride, decays,
):  # fmt: skip
    """sums[r, :] = decays[r] * sums[r, :] + weights[r, 0..count-1] · values[0..count-1, :] for some rows.

    values: bfloat16, head_dim (a multiple of 32) of them value_bytes from key to key; weights, sums and decays:
    float32. Of each 32 sums, the even columns precede the odd ones. decays 0 (no address): nothing is scaled.
    """
    for row in range(0, rows, ROW_BLOCK):
        here = sums + row * sums_stride
        row_weights = weights + row * weights_stride
        row_decays = decays + 4 * row if decays != 0 else decays
        column = 0
        while column + 2 * COLUMNS <= head_dim:
            _accumulate_wide(
                min(rows - row, ROW_BLOCK), values + 2 * column, ahead + 2 * column, value_bytes, row_weights,
                weights_stride, count, here + 4 * column, sums_stride, row_decays,
            )  # fmt: skip
            column += 2 * COLUMNS
        if column < head_dim:  # 32 more: rare, hence one row at a time
            for r in range(min(rows - row, ROW_BLOCK)):
                _accumulate(
                    1, 1, values + 2 * column, ahead + 2 * column, value_bytes, row_weights + r * weights_stride,
                    weights_stride, count, here + r * sums_stride + 4 * column, sums_stride,
                    row_decays + 4 * r if decays != 0 else decays,
                )  # fmt: skip
