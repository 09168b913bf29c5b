"""K and V of a step into their slots, and whole blocks copied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_block, stride_head, stride_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head). slots int64 [T]; a negative slot writes nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        d = tl.arange(0, D_PAD)
        ok = d < D
        at = (slot // PAGE) * stride_block + head * stride_head + (slot % PAGE) * stride_slot + d
        k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + d, mask=ok)
        v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + d, mask=ok)
        tl.store(k_cache_ptr + at, k.to(k_cache_ptr.dtype.element_ty), mask=ok)
        tl.store(v_cache_ptr + at, v.to(v_cache_ptr.dtype.element_ty), mask=ok)
