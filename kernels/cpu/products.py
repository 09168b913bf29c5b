"""Register blocks of matrix products with packed weights. Knows no layer and no tensor.

A block is `rows` rows of x times `vectors` vectors of 16 outputs, summed over the whole depth in registers: each sum
runs over k in ascending order whatever the block, so a result does not depend on how rows or outputs were cut.

Packed weights hold, for `vectors` vectors of outputs, one 64-byte vector after the other: 16 outputs times
    PAIRS   two bfloat16, k and k + 1: widened to float32 (the even one by a shift, the odd one by a mask)
    DOTS    the same bytes, multiplied by bfloat16 x in pairs: AVX512-BF16, which sums a pair at once
    SINGLE  one float32
    BYTES   four int8, k .. k + 3, multiplied by unsigned bytes of x into int32, exact: AVX512-VNNI where there is one
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.features import HAS_VNNI
from kernels.cpu.vectors import (
    LANES,
    _broadcast,
    _f32x16,
    _float,
    _fma,
    _i32,
    _i32x16,
    _load_f32,
    _offset,
    _pointer,
    _splat,
    intrinsic,
)

SINGLE, PAIRS, DOTS, BYTES = 0, 1, 2, 3
VECTOR_BYTES = 64
_INSTRUCTIONS = {DOTS: "llvm.x86.avx512bf16.dpbf16ps.512", BYTES: "llvm.x86.avx512.vpdpbusd.512"}

_i64 = ir.IntType(64)


def _load_i32(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, _i32x16), align=4)


def _prefetch(builder: Any, address: Any) -> None:
    """Into the second-level cache."""
    byte = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    builder.call(function, [builder.inttoptr(address, byte), *(ir.Constant(_i32, v) for v in (0, 2, 1))])


def _bytes_product(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """What vpdpbusd does, in what every processor has."""
    for place in range(4):
        unsigned = builder.and_(builder.lshr(x, _splat(8 * place, _i32)), _splat(0xFF, _i32))
        signed = builder.ashr(builder.shl(w, _splat(24 - 8 * place, _i32)), _splat(24, _i32))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


def _fused(builder: Any, name: str, total: Any, a: Any, b: Any) -> Any:
    """total + a · b by an instruction of x86. Types as LLVM had them first: newer versions translate."""
    kind = total.type
    function_type = ir.FunctionType(kind, [kind, _i32x16, _i32x16])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [total, a, b])


@intrinsic
def multiply_packed(typingctx, form, vectors, most_rows, rows, x, x_stride, w, c, c_stride, steps, fetch, unit):
    """c[r, :] = sum of x[r, k] * w[k, :]; c float32, or int32 of BYTES. Addresses and strides in bytes.

    Meanwhile `unit` bytes from `fetch` on are brought into the second-level cache for each vector of w: what is read
    next. A few rows wait for memory only, and the processor's own prefetching stops at page borders.

    form, vectors and most_rows are constants; 1 <= rows <= most_rows; most_rows * vectors accumulators must fit into
    the registers. `steps` vectors of depth, of 1, 2, 2, 4 k. x float32 (SINGLE, PAIRS), bfloat16 (DOTS), uint8 (BYTES).
    """
    if not all(isinstance(value, types.IntegerLiteral) for value in (form, vectors, most_rows)):
        return None

    def codegen(context, builder, signature, args):
        _, _, _, rows, *addresses = args
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, most_rows.literal_value + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(ir.Constant(_i64, count), case)
            builder.position_at_end(case)
            _emit_block(builder, form.literal_value, count, vectors.literal_value, *addresses)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(form, vectors, most_rows, *[types.int64] * 9), codegen


def _emit_block(
    builder: Any,
    form: int,
    num_rows: int,
    num_vectors: int,
    x: Any,
    x_stride: Any,
    w: Any,
    c: Any,
    c_stride: Any,
    steps: Any,
    fetch: Any,
    unit: Any,
) -> None:
    """One block of so many rows; ends in a new basic block."""
    kind = _i32x16 if form == BYTES else _f32x16
    nothing = ir.Constant(_i32x16, [0] * LANES) if form == BYTES else _splat(0.0)
    cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
    x_rows = [builder.add(x, builder.mul(x_stride, ir.Constant(_i64, r))) for r in range(num_rows)]
    entry = builder.block
    head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)

    builder.position_at_end(head)
    step, w_at, fetch_at = (builder.phi(_i64) for _ in range(3))
    sums = {cell: builder.phi(kind) for cell in cells}
    step.add_incoming(ir.Constant(_i64, 0), entry)
    w_at.add_incoming(w, entry)
    fetch_at.add_incoming(fetch, entry)
    for cell in cells:
        sums[cell].add_incoming(nothing, entry)
    builder.cbranch(builder.icmp_signed("<", step, steps), body, done)

    builder.position_at_end(body)
    at = [_offset(builder, w_at, VECTOR_BYTES * v) for v in range(num_vectors)]
    byte = builder.mul(step, ir.Constant(_i64, 8 if form == PAIRS else 4))
    x_at = [builder.add(row, byte) for row in x_rows]
    fetched = fetch_at
    for _ in range(num_vectors):
        _prefetch(builder, fetched)
        fetched = builder.add(fetched, unit)
    new = _emit_step(builder, form, x_at, at, sums)
    for cell in cells:
        sums[cell].add_incoming(new[cell], body)
    step.add_incoming(builder.add(step, ir.Constant(_i64, 1)), body)
    w_at.add_incoming(builder.add(w_at, ir.Constant(_i64, VECTOR_BYTES * num_vectors)), body)
    fetch_at.add_incoming(fetched, body)
    builder.branch(head)

    builder.position_at_end(done)
    for r, v in cells:
        target = builder.add(c, builder.mul(c_stride, ir.Constant(_i64, r)))
        builder.store(sums[r, v], _pointer(builder, _offset(builder, target, VECTOR_BYTES * v), kind), align=4)


def _emit_step(builder: Any, form: int, x_at: list[Any], w_at: list[Any], sums: Any) -> Any:
    """The sums after one vector of depth: x_at has an address for each row, w_at one for each vector."""
    new = dict(sums)
    if form in (DOTS, BYTES):
        weights = [_load_i32(builder, address) for address in w_at]
        for r, address in enumerate(x_at):
            element = builder.bitcast(_broadcast(builder, builder.load(_pointer(builder, address, _float))), _i32x16)
            for v, weight in enumerate(weights):
                if form == BYTES and not HAS_VNNI:
                    new[r, v] = _bytes_product(builder, new[r, v], element, weight)
                else:
                    new[r, v] = _fused(builder, _INSTRUCTIONS[form], new[r, v], element, weight)
        return new
    for part in range(2 if form == PAIRS else 1):
        weights = [_load_part(builder, form, part, address) for address in w_at]
        for r, address in enumerate(x_at):
            element = _broadcast(builder, builder.load(_pointer(builder, _offset(builder, address, 4 * part), _float)))
            for v, weight in enumerate(weights):
                new[r, v] = _fma(builder, element, weight, new[r, v])
    return new


def _load_part(builder: Any, form: int, part: int, address: Any) -> Any:
    """float32 weights of one k: a bfloat16 is the upper half of the float32 of the same value."""
    if form == SINGLE:
        return _load_f32(builder, address)
    pairs = _load_i32(builder, address)
    upper = builder.and_(pairs, _splat(0xFFFF0000, _i32)) if part else builder.shl(pairs, _splat(16, _i32))
    return builder.bitcast(upper, _f32x16)
