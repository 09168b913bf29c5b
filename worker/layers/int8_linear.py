"""y = x Wᵀ + b with 8-bit weights and 8-bit activations, on the CPU: AVX512-VNNI multiplies four bytes where float32
multiplies one number.

W is quantised once, symmetrically, with a scale for each output: W ≈ s_o · q, q in −127…127. Each row of x is
quantised when it comes, with a scale of its own: x_t ≈ s_t · (p − 128), p in 1…255. The sum over products of integers
is exact, so a row's result depends on nothing but the row: not on the batch, not on the order of sums. (Dettmers et al.
2022, LLM.int8(), "vector-wise quantisation", without the decomposition of outliers.)

A row with outliers leaves little of the range to its other elements. Where that hurts, a layer takes what the first
rounding left over as a second row: x_t ≈ s_t · p_t + s'_t · p'_t, twice the rows in one product, which costs little
where the weights are what is waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from worker.layers.cpu_ops import _OPTIONS, Buffer, load, matrix, store
from worker.layers.quantization import QuantizationUnavailable, why_unavailable

_ZERO = 128
"""What stands for 0 in a quantised row: VNNI multiplies unsigned by signed bytes."""


class Int8Linear:
    """Holds a weight [out, in] of float dtype as int8 and an optional bias [out]; answers as `linear.Linear` does.

    two_terms: rows are quantised in two steps, to 1/127² of their greatest element. Raises QuantizationUnavailable.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, two_terms: bool = False) -> None:
        self.terms = 2 if two_terms else 1
        reason = why_unavailable(weight.device, weight.dtype)
        if reason is not None:
            raise QuantizationUnavailable(reason)
        self.out_features = weight.shape[0]
        quantised, self.scales = quantise_weight(weight)
        self.weight = torch.ops.onednn.qlinear_prepack.default(quantised, None)
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self.bias = torch.zeros(0) if bias is None else bias.float().contiguous()
        self._rows = Buffer(torch.uint8)

    def __call__(self, x: Tensor) -> Tensor:
        """x dtype [rows, in], contiguous, bfloat16 or float32 → [rows, out], same dtype."""
        x = x.contiguous()
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        if len(x):
            product, scales = self.product(x)
            bias = self.bias.data_ptr() if len(self.bias) else 0
            _rescale(
                _kind(x.dtype), product.data_ptr(), scales.data_ptr(), bias, out.data_ptr(), *out.shape, self.terms
            )
        return out

    def product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 [terms · rows, out], float32 [terms · rows]): the result is the first, each row times its element of
        the second, summed over the terms, plus the bias. Row t's second term is row `rows + t`."""
        rows, size = x.shape
        quantised, address = self._rows.of_shape(self.terms * rows, size)
        row_scales = torch.empty(self.terms * rows, dtype=torch.float32)
        _quantise_rows(_kind(x.dtype), x.data_ptr(), address, row_scales.data_ptr(), rows, size, self.terms)
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            quantised, 1.0, _ZERO, self.weight, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product, row_scales


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float [out, in] → (int8 [out, in], float32 [out]): weight ≈ first · second[:, None], within half a step."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.round(wide / safe[:, None]).to(torch.int8), scales


def _kind(dtype: torch.dtype) -> Any:
    """What the kernels are told of a dtype: one element of the type as which they read it."""
    return np.uint16(0) if dtype is torch.bfloat16 else np.float32(0)


@njit(**_OPTIONS)
def _bits(value):
    """The bits of |value|, float32, as int32: ordered as the values are, and a maximum of integers vectorises."""
    return np.int32(np.float32(value).view(np.int32) & np.int32(0x7FFFFFFF))


@njit(**_OPTIONS)
def _most_bits(row, size):
    most = np.int32(0)
    for i in range(size):
        most = np.int32(max(most, _bits(load(row[i]))))
    return most


@njit(**_OPTIONS)
def _rounded(value, factor):
    """value · factor + 128, rounded half up: by truncation of what is positive."""
    return np.uint8(np.int32(value * factor + np.float32(128.5)))


@njit(**_OPTIONS)
def _quantise_rows(kind, x_at, out_at, scales_at, rows, size, terms):
    x = matrix(kind, x_at, rows, size)
    out = matrix(np.uint8(0), out_at, terms * rows, size)
    scales = matrix(np.float32(0), scales_at, 1, terms * rows)[0]
    for t in range(rows):
        row, result = x[t], out[t]
        bits = _most_bits(row, size)
        most = np.int32(bits).view(np.float32)
        step = most / np.float32(127)
        factor = np.float32(127) / most if most > np.float32(0) else np.float32(0)
        scales[t] = step
        for i in range(size):
            result[i] = _rounded(load(row[i]), factor)
        if terms == 2:  # what is left lies within half a step
            rest = out[rows + t]
            scales[rows + t] = step / np.float32(254)
            finer = factor * np.float32(254)
            for i in range(size):
                left = load(row[i]) - np.float32(np.int32(result[i]) - np.int32(128)) * step
                # at the edge of half a step the rounding of float32 may reach a little beyond
                rest[i] = _rounded(min(max(left * finer, np.float32(-127)), np.float32(127)), np.float32(1))


@njit(**_OPTIONS)
def _rescale(kind, product_at, scales_at, bias_at, out_at, rows, size, terms):
    product = matrix(np.float32(0), product_at, terms * rows, size)
    scales = matrix(np.float32(0), scales_at, 1, terms * rows)[0]
    out = matrix(kind, out_at, rows, size)
    for t in range(rows):
        row, result, scale = product[t], out[t], scales[t]
        if terms == 2:
            second, finer = product[rows + t], scales[rows + t]
            for i in range(size):
                row[i] = row[i] * scale + second[i] * finer
            scale = np.float32(1)
        if bias_at == 0:
            for i in range(size):
                store(result, i, row[i] * scale)
        else:
            bias = matrix(np.float32(0), bias_at, 1, size)[0]
            for i in range(size):
                store(result, i, row[i] * scale + bias[i])
