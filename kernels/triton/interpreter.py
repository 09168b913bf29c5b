"""What Triton's CPU interpreter gets wrong, mended, so that its results can be held against float64.

Each entry names the fault and the versions it was seen in. All mends are harmless where the fault is gone.

- `range` over a loaded bound raises TypeError with numpy >= 2.4 (3.6): int() of an array of one element.
- float32 → bfloat16 is cut off, not rounded to nearest even as on a GPU (3.6 to 3.8).
- bfloat16 is kept as its bits, and `dot` and arithmetic compute with the bits (3.6 to 3.8): `dot` widens here; sums
  and products raise, so that a kernel that forgot to widen is found and not believed.
- integers → bfloat16 become bits (3.6 to 3.8).
- float8 casts: rounding up into the next exponent gives half the value, 500 becomes 256, NaN becomes 480 (3.6 to 3.8).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz, tl.float8e5: torch.float8_e5m2}
_RAW_ARITHMETIC = ("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_precise_divf", "create_fma")
_CASTS = ("create_fp_trunc", "create_fp_ext", "create_fp_to_fp", "create_si_to_fp", "create_ui_to_fp")

ORIGINALS: dict[str, Any] = {}
"""What `install` replaced, by name: methods of the builder, and `_patch_lang_tensor` of its module."""

Handle = interpreter.TensorHandle


def install() -> None:
    """Mend the interpreter of this process. Does nothing the second time."""
    with suppress(ImportError):  # loaded at the first launch otherwise, when TRITON_INTERPRET may be unset again
        importlib.import_module("triton.experimental.gluon")
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "mended", False):
        return
    builder.mended = True
    ORIGINALS.update({name: getattr(builder, name) for name in (*_CASTS, "create_dot", *_RAW_ARITHMETIC)})
    ORIGINALS["_patch_lang_tensor"] = interpreter._patch_lang_tensor
    _mend_loop_bounds()
    for name in _CASTS:
        setattr(builder, name, _mended_cast(getattr(builder, name)))
    builder.create_dot = _mended_dot(builder.create_dot)
    for name in _RAW_ARITHMETIC:
        setattr(builder, name, _refusing_bfloat16(name, getattr(builder, name)))


def _mend_loop_bounds() -> None:
    module: Any = interpreter
    original = module._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    module._patch_lang_tensor = patch


def _mended_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if after == tl.bfloat16 and before != tl.bfloat16:
            return Handle(round_to_bfloat16(_as_float32(source)), after)
        if before == tl.bfloat16 or before in _FLOAT8 or after in _FLOAT8:
            values = _as_float32(source)
            if after in _FLOAT8:
                narrow = torch.from_numpy(np.ascontiguousarray(values)).to(_FLOAT8[after])
                return Handle(narrow.view(torch.uint8).numpy(), after)
            if after in (tl.float16, tl.float32):
                return Handle(values.astype(np.float16 if after == tl.float16 else np.float32), after)
        return original(self, source, target, *rest)

    return cast


def _mended_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = Handle(_as_float32(a), tl.float32), Handle(_as_float32(b), tl.float32)
        return original(self, a, b, *rest)

    return dot


def _refusing_bfloat16(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: Any, *operands: Any) -> Any:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError(f"{name} on bfloat16: the interpreter would compute with its bits; widen it first")
        return original(self, *operands)

    return operation


def _as_float32(handle: Any) -> np.ndarray:
    """The values of a handle of any dtype, float32."""
    dtype, data = handle.dtype.scalar, handle.data
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FLOAT8:
        return torch.from_numpy(np.ascontiguousarray(data)).view(_FLOAT8[dtype]).float().numpy()
    return data.astype(np.float32)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 → the bits of the nearest bfloat16, ties to even, uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
