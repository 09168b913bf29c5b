"""Two partial results of attention over different keys made one: cascades, chunked contexts, shared prefixes.

    merge_states(out_a, lse_a, out_b, lse_b) -> (out, lse)

A state is out [T, H, D], the softmax-weighted mean of values over some keys, and lse float32 [T, H], the *base-2*
logarithm of the sum of 2^score over them (scores already multiplied by log2 e, as everywhere in this package; a
natural-log lse times log2 e is one). A state that saw no key has lse -inf, and its out may hold anything, even NaN.
With m the greater lse: out = (out_m + w · out_other) / (1 + w), w = 2^(lse_other - m), lse = m + log2(1 + w)
(Rabe and Staats 2021). Written around the greater one the result has the same bits in either order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dispatch import can_run, check_same_device

ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows,
    stride_a_token, stride_a_head, stride_b_token, stride_b_head, stride_out_token, stride_out_head,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows), where row r is token r // H and head r % H. out may be out_a or out_b."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token, head = row // H, row % H
    d = tl.arange(0, D_PAD)
    lse_a = tl.load(lse_a_ptr + row, mask=inside, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row, mask=inside, other=float("-inf"))
    # a state without keys is not read: what is not a number stays so even when multiplied by 0
    d_ok = (d < D)[None, :]
    a_ok, b_ok = (lse_a > float("-inf"))[:, None] & d_ok, (lse_b > float("-inf"))[:, None] & d_ok
    a_at = token[:, None] * stride_a_token + head[:, None] * stride_a_head + d[None, :]
    b_at = token[:, None] * stride_b_token + head[:, None] * stride_b_head + d[None, :]
    a = tl.load(out_a_ptr + a_at, mask=a_ok, other=0.0).to(tl.float32)
    b = tl.load(out_b_ptr + b_at, mask=b_ok, other=0.0).to(tl.float32)
    first = lse_a >= lse_b
    most, least = tl.where(first, lse_a, lse_b), tl.where(first, lse_b, lse_a)
    shift = tl.where(most == float("-inf"), 0.0, most)  # -inf - -inf is no number
    weight = tl.exp2(least - shift)
    greater, lesser = tl.where(first[:, None], a, b), tl.where(first[:, None], b, a)
    merged = (greater + lesser * weight[:, None]) / (1.0 + weight)[:, None]
    at = token[:, None] * stride_out_token + head[:, None] * stride_out_head + d[None, :]
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=inside[:, None] & d_ok)
    tl.store(lse_ptr + row, most + tl.log2(1.0 + weight), mask=inside)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both states as one: (out [T, H, D], lse float32 [T, H]); rows that saw no key in either get 0 and -inf.

    out_a, out_b: [T, H, D], D contiguous, of any float dtypes; out has out_a's unless given, and may be out_a or out_b,
    as lse may be lse_a or lse_b. lse_a, lse_b: float32 [T, H], contiguous. Raises ValueError.
    """
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    for name, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        if tensor.dim() != 3 or tensor.shape != out_a.shape or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} must be [T, H, D] like out_a {tuple(out_a.shape)} with contiguous D, "
                f"not {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if tensor.dtype is not torch.float32 or tensor.shape != out_a.shape[:2] or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 {tuple(out_a.shape[:2])}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
    check_same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    num_tokens, num_heads, head_dim = out_a.shape
    if not out_a.numel():
        return out, lse
    if not can_run(merge_states_kernel, out):
        return _with_torch(out_a, lse_a, out_b, lse_b, out, lse)
    num_rows = num_tokens * num_heads
    merge_states_kernel[(triton.cdiv(num_rows, ROWS),)](
        out_a, lse_a, out_b, lse_b, out, lse, num_rows,
        out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1), out.stride(0), out.stride(1),
        H=num_heads, D=head_dim, D_PAD=triton.next_power_of_2(head_dim), ROWS=ROWS,
    )  # fmt: skip
    return out, lse


def _with_torch(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    nothing = -torch.inf
    a = torch.where((lse_a > nothing)[..., None], out_a.float(), 0.0)
    b = torch.where((lse_b > nothing)[..., None], out_b.float(), 0.0)
    first = lse_a >= lse_b
    most, least = torch.maximum(lse_a, lse_b), torch.minimum(lse_a, lse_b)
    weight = torch.exp2(least - torch.where(most == nothing, 0.0, most))
    greater, lesser = torch.where(first[..., None], a, b), torch.where(first[..., None], b, a)
    out.copy_((greater + lesser * weight[..., None]) / (1 + weight)[..., None])
    lse.copy_(most + torch.log2(1 + weight))
    return out, lse
