"""KV caches of one byte an element: what a number becomes in them, to the bit, whichever backend writes it.

A cache of such a dtype holds x / scale, with one positive scale for K and one for V per KV head, fixed from the start
(static): round to nearest even of the float32 quotient, clamped to the greatest number. NaN stays NaN in float8; int8
has none and takes 0. float8_e4m3fn is 1 sign, 4 exponent, 3 fraction bits (Micikevicius et al. 2022, FP8 Formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Quantised dtypes of a cache, with the greatest number that each is given (int8 stays symmetric)."""


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [num_tokens, num_kv_heads, D], scale float32 [num_kv_heads] → dtype, shaped like x."""
    limit = LIMITS[dtype]
    quotient = (x.float() / scale[:, None]).clamp(-limit, limit)
    if dtype is torch.int8:
        quotient = quotient.nan_to_num(0.0).round()
    return quotient.to(dtype)


def as_stored(x: Tensor) -> Tensor:
    """The same memory as int8 if x is quantised: torch cannot index float8 on every device."""
    return x.view(torch.int8) if x.dtype in LIMITS else x
