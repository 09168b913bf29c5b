"""Linear layers on a CPU: packed weights, float32 sums, and what follows a product done in the same pass.

bfloat16 weights are widened in registers and multiplied in float32; where this processor multiplies bfloat16 pairs
faster than float32, rows are rounded to bfloat16 instead. int8 weights have a scale for each output: W ≈ s_o · q, and
each row of x is quantised when it comes, with a scale of its own (Dettmers et al. 2022, LLM.int8(), "vector-wise
quantisation", without the decomposition of outliers). A row with outliers leaves little of the range to its other
elements; where that hurts, a layer takes what the first rounding left over as a second row: two terms.

A row's result depends on nothing but the row: not on the batch, the chunk or the number of threads, to the bit.
"""

from __future__ import annotations

import functools
import time

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import linear as kernels
from kernels.cpu import rows as row_kernels
from kernels.cpu.features import HAS_BF16_DOTS
from kernels.cpu.packing import DEPTH_OF_STEP, interleave, pack
from kernels.cpu.products import BYTES, DOTS, PAIRS, SINGLE
from kernels.cpu.rows import CONVERT, QUANTISE, ZERO_POINT
from kernels.cpu.team import Team, alone
from kernels.cpu.vectors import BF16, F32

DTYPES = (torch.bfloat16, torch.float32)
_KINDS = {torch.float32: F32, torch.bfloat16: BF16}  # not float16: `rows` reads no other kinds
_ROWS_DTYPES = {SINGLE: torch.float32, PAIRS: torch.float32, DOTS: torch.bfloat16, BYTES: torch.uint8}


class CpuLinear:
    """y = x Wᵀ + b, or y = silu(x Gᵀ) · (x Uᵀ) when made `gated`.

    Raises ValueError for weights that are neither float32 nor bfloat16. One call at a time on a team.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        team: Team | None = None,
        quantization: str = "none",
        two_terms: bool = False,
        out_dtype: torch.dtype | None = None,
        gated: bool = False,
        form: int | None = None,
        keep_out: bool = True,
    ) -> None:
        """weight [out, in], bias [out]; gated: the rows of G, then as many of U, and y has out / 2 columns.

        out_dtype: of what a call returns; None: the weight's. two_terms: rows of int8 layers are quantised in two
        steps, to 1/127² of their greatest element. keep_out: without it the next call on the team overwrites what a
        call returned. form: of bfloat16 weights, PAIRS or DOTS; None: what is faster.
        """
        if weight.dtype not in DTYPES or weight.device.type != "cpu":
            raise ValueError(f"weights are bfloat16 or float32 on the CPU, not {weight.dtype} on {weight.device}")
        self.team = team or alone()
        self.team.reserve(kernels.SCRATCH_BYTES)
        self.out_features = weight.shape[0] // 2 if gated else weight.shape[0]
        self.out_dtype = out_dtype or weight.dtype
        self._keep_out = keep_out
        self.terms = 2 if two_terms and quantization == "int8" else 1
        if gated:
            weight = interleave(*weight.chunk(2))
            bias = None if bias is None else interleave(*bias.chunk(2))
        zeros = scales = torch.zeros(0)
        if quantization == "int8":
            weight, scales = quantise_weight(weight)
            zeros = weight.sum(dim=1, dtype=torch.int32) * ZERO_POINT
            self.form = BYTES
        elif weight.dtype is torch.float32:
            self.form = SINGLE
        else:
            self.form = bfloat16_form() if form is None else form
        self.weight = pack(weight, self.form)
        depth = DEPTH_OF_STEP[self.form]
        steps = -(-weight.shape[1] // depth)
        self._padded = steps * depth
        panels = -(-weight.shape[0] // kernels.PANEL)
        vectors = [torch.zeros(0) if v is None else _panelled(v, panels) for v in (bias, scales, zeros)]
        self._vectors = vectors  # whose addresses are in the arguments
        arguments = np.zeros(len(kernels.WORDS), dtype=np.int64)
        arguments[kernels.FORM] = self.form
        arguments[kernels.ACTION] = kernels.GATE if gated else kernels.STORE
        arguments[kernels.WEIGHT] = arguments[kernels.FOLLOWING] = self.weight.data_ptr()
        arguments[kernels.PANELS] = panels // 2 if gated else panels
        arguments[kernels.STEPS] = steps
        arguments[kernels.OUTPUTS] = self.out_features
        arguments[kernels.BIAS : kernels.ZEROS + 1] = [v.data_ptr() if len(v) else 0 for v in vectors]
        arguments[kernels.TERMS] = self.terms
        self._arguments = arguments
        self._row_arguments = np.zeros(len(row_kernels.WORDS), dtype=np.int64)
        self._address = arguments.ctypes.data
        self._action = int(arguments[kernels.ACTION])

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 or float32 [rows, in], rows contiguous → out_dtype [rows, out]."""
        shape = (x.shape[0], self.out_features)
        if self._keep_out:
            out = torch.empty(shape, dtype=self.out_dtype)
        else:
            out = self.team.memory("out", self.out_dtype, shape[0] * shape[1]).view(shape)
        self._run(x, out, self._action)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual float32 [rows, out], contiguous, += y."""
        self._run(x, residual, kernels.ADD)

    def followed_by(self, other: CpuLinear) -> None:
        """Say which layer is computed next: its weights are fetched while the last of this layer are multiplied."""
        self._arguments[kernels.FOLLOWING] = other.weight.data_ptr()

    def _run(self, x: Tensor, out: Tensor, action: int) -> None:
        rows = x.shape[0]
        if not rows:
            return
        arguments = self._arguments
        source, stride, scales = self._rows(x)
        arguments[kernels.COUNTER] = 0
        arguments[kernels.ACTION] = action
        arguments[kernels.X :] = (
            source, stride, scales, rows, out.data_ptr(), self.out_features * out.element_size(), _KINDS[out.dtype]
        )  # fmt: skip
        if self.team.tape is not None:
            self.team.tape.add(kernels.LINEAR, arguments, rows=kernels.ROWS, shared=True, keep=(self, x, out))
        self.team.run(kernels.LINEAR, self._address)

    def _rows(self, x: Tensor) -> tuple[int, int, int]:
        """The rows as the products want them: address, stride in bytes, address of their scales."""
        rows, size = x.shape
        stride = x.stride(0) * x.element_size()
        wanted = _ROWS_DTYPES[self.form]
        if x.dtype is wanted and self._padded == size:
            return x.data_ptr(), stride, 0
        target = self.team.memory("rows", wanted, rows * self.terms * self._padded)
        if self._padded != size:
            target.view(rows * self.terms, self._padded)[:, size:] = ZERO_POINT if self.form == BYTES else 0
        address, out_stride = target.data_ptr(), self._padded * target.element_size()
        if self.form == BYTES:
            function, kept = QUANTISE, self.team.memory("scales", torch.float32, rows * self.terms)
            out_kind, scales = 0, kept.data_ptr()
        else:
            function, kept, out_kind, scales = CONVERT, None, _KINDS[wanted], 0
        arguments = self._row_arguments
        arguments[:] = (
            x.data_ptr(), stride, _KINDS[x.dtype], address, out_stride, out_kind, scales, rows, size, self.terms
        )  # fmt: skip
        if self.team.tape is not None:
            self.team.tape.add(function, arguments, rows=row_kernels.ROWS, keep=(x, target, kept))
        self.team.alone(function, arguments.ctypes.data)
        return address, out_stride, scales


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float [out, in] → (int8 [out, in], float32 [out]): weight ≈ first · second[:, None], within half a step."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.round(wide / safe[:, None]).to(torch.int8), scales


def _panelled(vector: Tensor, panels: int) -> Tensor:
    """float or int32 [out] → float32 or int32, padded with zeros to whole panels."""
    vector = vector if vector.dtype is torch.int32 else vector.float()
    return torch.nn.functional.pad(vector, (0, panels * kernels.PANEL - len(vector))) if len(vector) else vector


@functools.cache
def bfloat16_form() -> int:
    """How this processor multiplies bfloat16 weights faster, measured: takes some milliseconds."""
    if not HAS_BF16_DOTS:
        return PAIRS
    x, weight = torch.ones(64, 512), torch.ones(480, 512, dtype=torch.bfloat16)
    seconds = {}
    for form in (PAIRS, DOTS):
        layer = CpuLinear(weight, form=form)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            layer(x)
            times.append(time.perf_counter() - start)
        seconds[form] = min(times)
    # A tie goes to the float32 products, which round less.
    return DOTS if seconds[DOTS] * 1.1 < seconds[PAIRS] else PAIRS
