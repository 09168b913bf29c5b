"""What Triton's CPU interpreter gets wrong, mended, so that its results can be held against float64.

Triton 3.6 to 3.8: float32 → bfloat16 is cut off instead of rounded to nearest even, as a GPU does; and arithmetic on
bfloat16 works on its bit patterns (`FP32_DOT` keeps the kernels away from that: they widen before they multiply).
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Mend the interpreter of this process. Does nothing the second time."""
    with suppress(ImportError):  # loaded at the first launch otherwise, when TRITON_INTERPRET may be unset again
        importlib.import_module("triton.experimental.gluon")
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder.create_fp_trunc, "mended", False):
        return
    original = builder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(round_to_bfloat16(source.data), target.scalar)
        return original(self, source, target)

    create_fp_trunc.mended = True  # type: ignore[attr-defined]
    builder.create_fp_trunc = create_fp_trunc


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 → the bits of the nearest bfloat16, ties to even, uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
