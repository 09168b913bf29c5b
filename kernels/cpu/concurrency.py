"""Words for kernels that several threads run: atomic words of memory, a semaphore to sleep on, calls by address.

Addresses are plain int64, as in `vectors`. The compiler neither caches nor moves what is read or written here.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.vectors import _X86, _pointer, intrinsic

SEMAPHORE_BYTES = 32  # sem_t of glibc and musl on 64-bit machines

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_byte = ir.IntType(8).as_pointer()


@intrinsic
def fetch_add(typingctx, address, amount):
    """Atomically add to the int64 at address; the value before. Shares work out among threads."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], _i64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def raise_to(typingctx, address, value):
    """Atomically make the int64 at address at least `value`."""

    def codegen(context, builder, signature, args):
        builder.atomic_rmw("max", _pointer(builder, args[0], _i64), args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def replace_zero(typingctx, address, value):
    """Atomically write `value` to the int64 at address if that is 0; whether it was."""

    def codegen(context, builder, signature, args):
        nothing = ir.Constant(_i64, 0)
        result = builder.cmpxchg(_pointer(builder, args[0], _i64), nothing, args[1], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def read_shared(typingctx, address):
    """The int64 at address, which other threads or processes may write at any time."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], _i64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write_shared(typingctx, address, value):
    """What was written before this is seen by whoever reads this value with read_shared."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], _i64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call(typingctx, function, first, second, third):
    """function(first, second, third): the address of a compiled int64(int64, int64, int64)."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(_i64, [_i64] * 3)
        return builder.call(_pointer(builder, args[0], function_type), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """What a spinning thread tells the processor, where it can be told."""

    def codegen(context, builder, signature, args):
        if _X86:
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_processor(typingctx):
    """Let another thread have this core: POSIX sched_yield."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(_i32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _semaphore_word(name: str, constants: tuple[int, ...] = ()) -> Any:
    """A POSIX function of a semaphore's address, and of these constants."""

    def typed(typingctx, address):
        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(_i32, [_byte] + [_i32] * len(constants))
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            semaphore = builder.inttoptr(args[0], _byte)
            builder.call(function, [semaphore, *(ir.Constant(_i32, value) for value in constants)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return intrinsic(typed)


make_semaphore = _semaphore_word("sem_init", (0, 0))  # of this process, at 0
wait_for_post = _semaphore_word("sem_wait")  # may return early, when a signal comes
post = _semaphore_word("sem_post")
