"""Sixteen float32 in one value, and raw memory, as words that Numba kernels can say. Knows no attention.

LLVM is given vector instructions outright instead of loops that it may or may not vectorise: so the speed does not
hang on its mood, and every sum has one fixed order, which makes results the same bits whatever the batch. A vector
becomes one AVX-512 register, two of AVX2 or four of NEON. Addresses are plain int64, in bytes: the caller keeps the
memory alive and has checked the bounds.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, extending, types
from numba.core.datamodel import models, register_default

LANES = 16
_X86 = platform.machine() in ("x86_64", "AMD64")
F32, BF16, F16 = 0, 1, 2  # element kinds in memory

intrinsic: Any = extending.intrinsic  # what it makes is called without the typing context: say so to the type checker

_float = ir.FloatType()
_i32 = ir.IntType(32)
_i16 = ir.IntType(16)
_f32x16 = ir.VectorType(_float, LANES)
_i32x16 = ir.VectorType(_i32, LANES)
_i16x16 = ir.VectorType(_i16, LANES)
_f16x16 = ir.VectorType(ir.HalfType(), LANES)


class Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_default(Float32x16)
class Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _f32x16)


# -- emitters: plain functions that append LLVM instructions ---------------------------------------------------------


def _splat(value: float, element: ir.Type = _float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def _broadcast(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_f32x16, ir.Undefined), scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, ir.Constant(_f32x16, ir.Undefined), ir.Constant(_i32x16, [0] * LANES))


def _pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _offset(builder: Any, address: Any, byte_offset: int) -> Any:
    return builder.add(address, ir.Constant(address.type, byte_offset)) if byte_offset else address


def _load_f32(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, _f32x16), align=4)


def _store_f32(builder: Any, address: Any, vector: Any) -> None:
    builder.store(vector, _pointer(builder, address, _f32x16), align=4)


def _load_bf16(builder: Any, address: Any) -> Any:
    """A bfloat16 is the upper half of the float32 of the same value."""
    bits = builder.load(_pointer(builder, address, _i16x16), align=2)
    return builder.bitcast(builder.shl(builder.zext(bits, _i32x16), _splat(16, _i32)), _f32x16)


def _load_f16(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.load(_pointer(builder, address, _f16x16), align=2), _f32x16)


def _round_bf16(builder: Any, vector: Any) -> Any:
    """int32 whose upper halves are the bfloat16: nearest, ties to even, as in PyTorch; NaN becomes the quiet 0x7fc0."""
    bits = builder.bitcast(vector, _i32x16)
    odd = builder.and_(builder.lshr(bits, _splat(16, _i32)), _splat(1, _i32))
    rounded = builder.add(builder.add(bits, odd), _splat(0x7FFF, _i32))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.select(is_nan, _splat(0x7FC00000, _i32), rounded)


def _store_bf16(builder: Any, address: Any, vector: Any) -> None:
    half = builder.trunc(builder.lshr(_round_bf16(builder, vector), _splat(16, _i32)), _i16x16)
    builder.store(half, _pointer(builder, address, _i16x16), align=2)


def _store_f16(builder: Any, address: Any, vector: Any) -> None:
    builder.store(builder.fptrunc(vector, _f16x16), _pointer(builder, address, _f16x16), align=2)


def _prefetch(builder: Any, address: Any, *, near: bool) -> None:
    """Ask for a cache line; near: in the first-level cache, else in the second-level one. Never faults."""
    byte = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    read, locality, data = (ir.Constant(_i32, value) for value in (0, 3 if near else 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, locality, data])


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(_f32x16, [_f32x16] * 3)
    fmuladd = cgutils.get_or_insert_function(builder.module, function_type, "llvm.fmuladd.v16f32")
    return builder.call(fmuladd, [a, b, c])


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    """b where either is NaN: one instruction on x86."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _halves(builder: Any, vector: Any, distance: int) -> Any:
    """The vector with its lanes rotated by `distance`, so that lane i meets lane i + distance."""
    order = [(lane + distance) % LANES for lane in range(LANES)]
    return builder.shuffle_vector(vector, vector, ir.Constant(_i32x16, order))


# 2^f = 1 + f * (c0 + f * (c1 + ...)) for |f| <= 1/2: minimax in relative error, 9.2e-8 at most; exactly 1 at f = 0.
_EXP2 = (0.6931469776026435, 0.2402224208404537, 0.05550733738866608, 0.009671512700782663, 0.0013264728448017535)
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 126; 0 from -127 down (so also for -inf), above it to -126 less than 1.2e-38; NaN stays NaN.

    At -127, to which all below is raised, the exponent cancels the bits of 1.0 to those of 0.0.
    """
    clamped = _maximum(builder, _splat(-127.0), x)
    shifted = builder.fadd(clamped, _splat(_MAGIC))
    fraction = builder.fsub(clamped, builder.fsub(shifted, _splat(_MAGIC)))
    polynomial = _splat(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        polynomial = _fma(builder, polynomial, fraction, _splat(coefficient))
    polynomial = _fma(builder, polynomial, fraction, _splat(1.0))
    exponent = builder.shl(builder.bitcast(shifted, _i32x16), _splat(23, _i32))
    return builder.bitcast(builder.add(builder.bitcast(polynomial, _i32x16), exponent), _f32x16)


# -- words for kernels: memory ---------------------------------------------------------------------------------------


@intrinsic
def load_f32(typingctx, address):
    """float32x16 at a byte address."""
    return float32x16(types.int64), lambda context, builder, sig, args: _load_f32(builder, args[0])


@intrinsic
def load_bf16(typingctx, address):
    """Sixteen bfloat16, widened."""
    return float32x16(types.int64), lambda context, builder, sig, args: _load_bf16(builder, args[0])


@intrinsic
def load_f16(typingctx, address):
    """Sixteen float16, widened."""
    return float32x16(types.int64), lambda context, builder, sig, args: _load_f16(builder, args[0])


@intrinsic
def load_i32_difference(typingctx, address, subtracted):
    """Sixteen int32 at one address less those at another, as float32."""

    def codegen(context, builder, signature, args):
        values = [builder.load(_pointer(builder, address, _i32x16), align=4) for address in args]
        return builder.sitofp(builder.sub(*values), _f32x16)

    return float32x16(types.int64, types.int64), codegen


def _store_word(emit: Any) -> Any:
    def typed(typingctx, address, vector):
        def codegen(context, builder, signature, args):
            emit(builder, args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, float32x16), codegen

    return intrinsic(typed)


store_f32 = _store_word(_store_f32)
store_bf16 = _store_word(_store_bf16)  # rounded to nearest even
store_f16 = _store_word(_store_f16)  # rounded to nearest even


@intrinsic
def store_bytes(typingctx, address, vector):
    """Values in -127 … 127, rounded half up, plus 128, as sixteen uint8; returns what was rounded to, float32."""

    def codegen(context, builder, signature, args):
        shifted = builder.fadd(args[1], _splat(128.5))  # never negative: truncation rounds down
        numbers = builder.fptosi(shifted, _i32x16)
        vector_type = ir.VectorType(ir.IntType(8), LANES)
        builder.store(builder.trunc(numbers, vector_type), _pointer(builder, args[0], vector_type), align=1)
        return builder.sitofp(builder.sub(numbers, _splat(128, _i32)), _f32x16)

    return float32x16(types.int64, float32x16), codegen


@intrinsic
def write_byte(typingctx, address, value):
    """store_bytes for one."""

    def codegen(context, builder, signature, args):
        number = builder.fptosi(builder.fadd(args[1], ir.Constant(_float, 128.5)), _i32)
        builder.store(builder.trunc(number, ir.IntType(8)), _pointer(builder, args[0], ir.IntType(8)))
        return builder.sitofp(builder.sub(number, ir.Constant(_i32, 128)), _float)

    return types.float32(types.int64, types.float32), codegen


@intrinsic
def read_bf16(typingctx, address):
    """One bfloat16, widened."""

    def codegen(context, builder, signature, args):
        bits = builder.load(_pointer(builder, args[0], _i16), align=2)
        return builder.bitcast(builder.shl(builder.zext(bits, _i32), ir.Constant(_i32, 16)), _float)

    return types.float32(types.int64), codegen


def _scalar_load(numba_type: Any, llvm_type: ir.Type) -> Any:
    def typed(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load(_pointer(builder, args[0], llvm_type))

        return numba_type(types.int64), codegen

    return intrinsic(typed)


def _scalar_store(numba_type: Any, llvm_type: ir.Type) -> Any:
    def typed(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], _pointer(builder, args[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return intrinsic(typed)


read_i32 = _scalar_load(types.int32, _i32)
read_i64 = _scalar_load(types.int64, ir.IntType(64))
read_float = _scalar_load(types.float32, _float)
read_double = _scalar_load(types.float64, ir.DoubleType())
write_i64 = _scalar_store(types.int64, ir.IntType(64))
write_float = _scalar_store(types.float32, _float)


@intrinsic
def write_bf16(typingctx, address, value):
    """One float32 → bfloat16, rounded to nearest even; NaN becomes 0x7fc0."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[1], _i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_i32, 16)), ir.Constant(_i32, 1))
        upper = builder.lshr(builder.add(builder.add(bits, odd), ir.Constant(_i32, 0x7FFF)), ir.Constant(_i32, 16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        half = builder.trunc(builder.select(is_nan, ir.Constant(_i32, 0x7FC0), upper), _i16)
        builder.store(half, _pointer(builder, args[0], _i16), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at address to be brought into the second-level cache. Never faults."""

    def codegen(context, builder, signature, args):
        _prefetch(builder, args[0], near=False)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """memcpy; the ranges must not overlap."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8)
        cgutils.raw_memcpy(
            builder, _pointer(builder, args[0], byte), _pointer(builder, args[1], byte), args[2], itemsize=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# -- words for kernels: arithmetic -----------------------------------------------------------------------------------


@intrinsic
def splat(typingctx, scalar):
    """All sixteen lanes the same float32."""
    return float32x16(types.float32), lambda context, builder, sig, args: _broadcast(builder, args[0])


@intrinsic
def first(typingctx, vector):
    """Lane 0."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], ir.Constant(_i32, 0))

    return types.float32(float32x16), codegen


@intrinsic
def add(typingctx, a, b):
    return float32x16(float32x16, float32x16), lambda context, builder, sig, args: builder.fadd(*args)


@intrinsic
def sub(typingctx, a, b):
    return float32x16(float32x16, float32x16), lambda context, builder, sig, args: builder.fsub(*args)


@intrinsic
def mul(typingctx, a, b):
    return float32x16(float32x16, float32x16), lambda context, builder, sig, args: builder.fmul(*args)


@intrinsic
def divide(typingctx, a, b):
    return float32x16(float32x16, float32x16), lambda context, builder, sig, args: builder.fdiv(*args)


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once where the machine can."""
    return float32x16(float32x16, float32x16, float32x16), lambda context, builder, sig, args: _fma(builder, *args)


@intrinsic
def negate(typingctx, vector):
    return float32x16(float32x16), lambda context, builder, sig, args: builder.fneg(args[0])


@intrinsic
def maximum(typingctx, a, b):
    """Lane by lane; b where either is NaN."""
    return float32x16(float32x16, float32x16), lambda context, builder, sig, args: _maximum(builder, *args)


@intrinsic
def minimum(typingctx, a, b):
    """Lane by lane; b where either is NaN."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return float32x16(float32x16, float32x16), codegen


@intrinsic
def absolute(typingctx, a):
    def codegen(context, builder, signature, args):
        bits = builder.and_(builder.bitcast(args[0], _i32x16), _splat(0x7FFFFFFF, _i32))
        return builder.bitcast(bits, _f32x16)

    return float32x16(float32x16), codegen


@intrinsic
def exp2(typingctx, x):
    """2^x for x <= 126, to 1e-7 relative from -126 on; 0 from -127 down; NaN stays NaN."""
    return float32x16(float32x16), lambda context, builder, sig, args: _exp2(builder, args[0])


@intrinsic
def tanh_half(typingctx, y):
    """tanh(y / (2 log2 e)) = 1 - 2 / (2^y + 1): no overflow whatever the size of y."""

    def codegen(context, builder, signature, args):
        high = _splat(126.0)
        clamped = builder.select(builder.fcmp_ordered(">", args[0], high), high, args[0])
        denominator = builder.fadd(_exp2(builder, clamped), _splat(1.0))
        return builder.fsub(_splat(1.0), builder.fdiv(_splat(2.0), denominator))

    return float32x16(float32x16), codegen


@intrinsic
def keep_lanes(typingctx, vector, low, high, fill):
    """Lanes low <= lane < high of the vector, `fill` (float32) in the others. A select: nothing of those shows."""

    def codegen(context, builder, signature, args):
        vector, low, high, fill = args
        lane = ir.Constant(_i32x16, list(range(LANES)))

        def spread(value: Any) -> Any:
            short = builder.bitcast(builder.trunc(value, _i32), _float)
            return builder.bitcast(_broadcast(builder, short), _i32x16)

        above = builder.icmp_signed(">=", lane, spread(low))
        below = builder.icmp_signed("<", lane, spread(high))
        return builder.select(builder.and_(above, below), vector, _broadcast(builder, fill))

    return float32x16(float32x16, types.int64, types.int64, types.float32), codegen


def _reduction(combine: Any) -> Any:
    def typed(typingctx, vector):
        def codegen(context, builder, signature, args):
            result = args[0]
            for distance in (8, 4, 2, 1):
                result = combine(builder, result, _halves(builder, result, distance))
            return builder.extract_element(result, ir.Constant(_i32, 0))

        return types.float32(float32x16), codegen

    return intrinsic(typed)


sum_lanes = _reduction(lambda builder, a, b: builder.fadd(a, b))  # always the same tree
max_lanes = _reduction(_maximum)


@intrinsic
def max_of_rows(typingctx, address, stride, vectors):
    """Lane r: the greatest of the 16 * vectors float32 at address + r * stride. `vectors` is a constant."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        address, stride, _ = args

        def row(r: int) -> Any:
            start = builder.add(address, builder.mul(stride, ir.Constant(stride.type, r)))
            top = _load_f32(builder, start)
            for v in range(1, vectors.literal_value):
                top = _maximum(builder, top, _load_f32(builder, _offset(builder, start, 64 * v)))
            return top

        def tops(first_row: int, size: int) -> Any:
            """Of rows first_row, first_row + size, ...: lane by lane, those whose bits below `size` are its row's."""
            if size == LANES:
                return row(first_row)
            a, b = tops(first_row, 2 * size), tops(first_row + size, 2 * size)
            own = [lane + (LANES if lane & size else 0) for lane in range(LANES)]
            other = [lane ^ size for lane in own]
            shuffled = (builder.shuffle_vector(a, b, ir.Constant(_i32x16, order)) for order in (own, other))
            return _maximum(builder, *shuffled)

        return tops(0, 1)

    return float32x16(types.int64, types.int64, vectors), codegen


# -- words for kernels: tiles ----------------------------------------------------------------------------------------


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Lanes in this order; those of b are numbered from 16 on."""
    return builder.shuffle_vector(a, b, ir.Constant(_i32x16, order))


# Of two vectors: their even or odd quarters; elements (or pairs of them) of each quarter's lower or upper half in turn.
_EVEN_QUARTERS = [quarter + i for quarter in (0, 8, 16, 24) for i in range(4)]
_ODD_QUARTERS = [lane + 4 for lane in _EVEN_QUARTERS]
_LOWER = [quarter + side + i for quarter in (0, 4, 8, 12) for i in (0, 1) for side in (0, LANES)]
_UPPER = [lane + 2 for lane in _LOWER]
_LOWER_PAIRS = [quarter + side + i for quarter in (0, 4, 8, 12) for side in (0, LANES) for i in (0, 1)]
_UPPER_PAIRS = [lane + 2 for lane in _LOWER_PAIRS]


def _by_fours(builder: Any, rows: list[Any]) -> list[Any]:
    """Of each four rows, 4 x 4 elements transposed in each quarter: [4 g + c] has their columns c, c + 4, ..."""
    fours = []
    for i in range(0, len(rows), 4):
        pairs = [_shuffle(builder, rows[j], rows[j + 1], order) for j in (i, i + 2) for order in (_LOWER, _UPPER)]
        for half in range(2):
            fours += [_shuffle(builder, pairs[half], pairs[half + 2], order) for order in (_LOWER_PAIRS, _UPPER_PAIRS)]
    return fours


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """16 x 16, in four rounds of shuffles that x86 has as single instructions: 4 x 4 in each quarter, then quarters."""
    fours = _by_fours(builder, rows)
    columns = [None] * LANES
    for c in range(4):
        for odd, quarters in enumerate((_EVEN_QUARTERS, _ODD_QUARTERS)):
            upper = _shuffle(builder, fours[c], fours[4 + c], quarters)
            lower = _shuffle(builder, fours[8 + c], fours[12 + c], quarters)
            columns[4 * odd + c] = _shuffle(builder, upper, lower, _EVEN_QUARTERS)
            columns[4 * odd + 8 + c] = _shuffle(builder, upper, lower, _ODD_QUARTERS)
    return columns


def _transpose_joined(builder: Any, rows: list[Any]) -> list[Any]:
    """16 x 8 → 8 columns. The rows come in pairs: 0 and 4, 1 and 5, 2 and 6, 3 and 7, then 8 and 12 and so on."""
    fours = _by_fours(builder, rows)
    return [
        _shuffle(builder, fours[c], fours[4 + c], quarters)
        for quarters in (_EVEN_QUARTERS, _ODD_QUARTERS)
        for c in range(4)
    ]


def _row_addresses(builder: Any, table: Any, byte_offset: Any) -> list[Any]:
    i64 = ir.IntType(64)
    rows = []
    for i in range(LANES):
        address = builder.load(_pointer(builder, _offset(builder, table, 8 * i), i64))
        rows.append(builder.add(address, byte_offset))
    return rows


def _transpose_word(load: Any) -> Any:
    def typed(typingctx, table, byte_offset, target, target_stride):
        def codegen(context, builder, signature, args):
            table, byte_offset, target, target_stride = args
            rows = [load(builder, address) for address in _row_addresses(builder, table, byte_offset)]
            for column in _transpose(builder, rows):
                _store_f32(builder, target, column)
                target = builder.add(target, target_stride)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return intrinsic(typed)


# Sixteen rows, their addresses in a table of int64, sixteen columns from a byte offset on → the transpose, in float32.
transpose_f32 = _transpose_word(_load_f32)
transpose_bf16 = _transpose_word(_load_bf16)
transpose_f16 = _transpose_word(_load_f16)


@intrinsic
def transpose_bf16_pairs(typingctx, table, byte_offset, target, target_stride):
    """As transpose_bf16 but for 32 columns: bfloat16 move in pairs, which halves the shuffles."""

    def codegen(context, builder, signature, args):
        table, byte_offset, target, target_stride = args
        rows = []
        for address in _row_addresses(builder, table, byte_offset):
            rows.append(builder.load(_pointer(builder, address, _i32x16), align=2))
        for pair in _transpose(builder, rows):
            _store_f32(builder, target, builder.bitcast(builder.shl(pair, _splat(16, _i32)), _f32x16))
            target = builder.add(target, target_stride)
            upper = builder.and_(pair, _splat(0xFFFF0000, _i32))
            _store_f32(builder, target, builder.bitcast(upper, _f32x16))
            target = builder.add(target, target_stride)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_block(typingctx, rows, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay):
    """c[r, :] = decay[r] * c[r, :] + sum over k < depth of a[r, k] * b[k, :], all float32.

    With decay 0 (no address), c is not read. `rows` and `vectors` (of 16 columns) are constants, and rows * vectors
    accumulators stay in registers. Each element sums its products in the order of k, so the result does not depend
    on how a matrix was cut into blocks. Strides in bytes.
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(vectors, types.IntegerLiteral)):
        return None
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, a, a_stride, b, b_stride, c, c_stride, depth, decay = args
        i64 = ir.IntType(64)
        zero = ir.Constant(i64, 0)
        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        a_rows = [builder.add(a, builder.mul(a_stride, ir.Constant(i64, r))) for r in range(num_rows)]
        c_rows = [builder.add(c, builder.mul(c_stride, ir.Constant(i64, r))) for r in range(num_rows)]
        entry = builder.block
        decayed = builder.append_basic_block("decayed")
        head = builder.append_basic_block("head")
        body = builder.append_basic_block("body")
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("==", decay, zero), head, decayed)

        builder.position_at_end(decayed)
        scaled = {}
        for r in range(num_rows):
            factor = builder.load(_pointer(builder, _offset(builder, decay, 4 * r), _float))
            factor = _broadcast(builder, factor)
            for v in range(num_vectors):
                old = _load_f32(builder, _offset(builder, c_rows[r], 64 * v))
                scaled[r, v] = builder.fmul(old, factor)
        builder.branch(head)

        builder.position_at_end(head)
        k = builder.phi(i64)
        b_row = builder.phi(i64)
        sums = {cell: builder.phi(_f32x16) for cell in cells}
        for block in (entry, decayed):
            k.add_incoming(zero, block)
            b_row.add_incoming(b, block)
        for cell in cells:
            sums[cell].add_incoming(_splat(0.0), entry)
            sums[cell].add_incoming(scaled[cell], decayed)
        builder.cbranch(builder.icmp_signed("<", k, depth), body, done)

        builder.position_at_end(body)
        b_vectors = [_load_f32(builder, _offset(builder, b_row, 64 * v)) for v in range(num_vectors)]
        byte = builder.shl(k, ir.Constant(i64, 2))
        for r in range(num_rows):
            element = builder.load(_pointer(builder, builder.add(a_rows[r], byte), _float))
            element = _broadcast(builder, element)
            for v in range(num_vectors):
                sums[r, v].add_incoming(_fma(builder, element, b_vectors[v], sums[r, v]), body)
        k.add_incoming(builder.add(k, ir.Constant(i64, 1)), body)
        b_row.add_incoming(builder.add(b_row, b_stride), body)
        builder.branch(head)

        builder.position_at_end(done)
        for r, v in cells:
            _store_f32(builder, _offset(builder, c_rows[r], 64 * v), sums[r, v])
        return context.get_dummy_value()

    return types.void(rows, vectors, *[types.int64] * 8), codegen
