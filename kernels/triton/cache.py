"""K and V of a step into their slots, quantised if the cache is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, scale, limit, dtype: tl.constexpr):
    """x / scale in a quantised dtype, rounded to nearest even, beyond ±limit clamped; see `kernels.quantise`."""
    x = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        x = tl.where(x == x, x, 0.0)
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits left for a fraction
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, limit,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_block, stride_head, stride_slot,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS of the H KV heads). slots int64 [T]; a negative slot writes nothing.

    k_scale, v_scale float32 [H]: a quantised cache holds k / k_scale and v / v_scale.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D_PAD)
    heads_ok = heads < H
    ok = heads_ok[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + token * stride_k_token + heads[:, None] * stride_k_head + d[None, :], mask=ok)
    v = tl.load(v_ptr + token * stride_v_token + heads[:, None] * stride_v_head + d[None, :], mask=ok)
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    if QUANTISED:
        k = narrow(k, tl.load(k_scale_ptr + heads, mask=heads_ok, other=1.0)[:, None], limit, dtype)
        v = narrow(v, tl.load(v_scale_ptr + heads, mask=heads_ok, other=1.0)[:, None], limit, dtype)
    row = (slot // PAGE) * stride_block + (slot % PAGE) * stride_slot
    at = row + heads.to(tl.int64)[:, None] * stride_head + d[None, :]
    tl.store(k_cache_ptr + at, k.to(dtype), mask=ok)
    tl.store(v_cache_ptr + at, v.to(dtype), mask=ok)
