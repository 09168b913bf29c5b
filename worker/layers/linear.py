"""y = x Wᵀ + b, in the fastest form a device has. Knows nothing of what the weight means.

On the CPU the weight is packed once into oneDNN's blocked layout; one packing serves all batch sizes. Measured on one
core of an AVX512-BF16 Xeon without AMX, against `F.linear`: 1.2 to 1.9 times faster in bfloat16 and up to 2.3 times
in float32 for 1 to 64 rows. (The operators are those that torch.compile uses for frozen weights.)

On that Xeon bfloat16 products reach 88 GFLOP/s a core, float32 ones 165: bfloat16 halves the bytes of a weight, which
decides for few rows, but not the time of its arithmetic, which decides for many. So a bfloat16 layer may hold its
weight in float32 too, for batches of many rows (products of bfloat16 are exact in float32; only the order of sums
differs). SmolLM2-135M, one core: prefill of 256 tokens 710 → 440 ms; break-even at 24 rows. Where bfloat16 arithmetic
is the faster one (AMX), `float32_is_faster` says no.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor
from torch.nn import functional

WIDE_ROWS = 24
"""From so many rows on a widened layer computes in float32; for fewer, reading the larger weight costs too much."""

_PACKED_DTYPES = (torch.bfloat16, torch.float32)
_PACKING_ROWS = 16  # oneDNN asks for a batch size to pack for; the layout it picks does not depend on it here


class Linear:
    """Holds W [out, in] (packed or plain) and an optional b [out], both of one dtype.

    widen: hold a bfloat16 weight on the CPU in float32 too, three times the memory in all.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, widen: bool = False) -> None:
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and _can_pack()
        self.wide: Tensor | None = None
        self.wide_bias: Tensor | None = None
        if self.packed and widen and weight.dtype is torch.bfloat16:
            self.wide = _pack(weight.float())
            self.wide_bias = None if bias is None else bias.float()
        self.weight = _pack(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out], same dtype; products are summed in float32."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        if self.wide is not None and x.shape[0] >= WIDE_ROWS:
            return _multiply(x.float(), self.wide, self.wide_bias).to(x.dtype)
        return _multiply(x, self.weight, self.bias)


@functools.cache
def float32_is_faster() -> bool:
    """Whether this machine multiplies large float32 matrices clearly faster than bfloat16 ones. Takes about 10 ms."""
    if not _can_pack():
        return False
    seconds = {}
    with torch.inference_mode():
        for dtype in _PACKED_DTYPES:
            x, weight = torch.ones(64, 512, dtype=dtype), _pack(torch.ones(512, 512, dtype=dtype))
            times = []
            for _ in range(8):
                start = time.perf_counter()
                _multiply(x, weight, None)
                times.append(time.perf_counter() - start)
            seconds[dtype] = min(times)
    return seconds[torch.float32] * 1.25 < seconds[torch.bfloat16]


def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _PACKING_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return result
