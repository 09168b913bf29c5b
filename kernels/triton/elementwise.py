"""What stands between the matrix products of a layer on a GPU: norm, rotation, gate; one pass over the data each.

    ops = TritonOps(dtype)                             # dtype of the model's activations
    ops.add_norm(residual, x, weight, eps)             # residual += x; RMSNorm(residual) · weight
    ops.norm_heads(rows, first, count, weight, eps)    # RMSNorm of some heads, in place
    ops.rotate(rows, count, positions, table)          # RoPE of the first heads, in place
    ops.rotate_and_write_kv(qkv, num_heads, positions, table, k_cache, v_cache, slots, q_norm=…, k_norm=…, eps=…)
    ops.silu_and_mul(gate_up)                          # SwiGLU

They are the operations of the worker's layers, with the same contracts, and one more: rotate_and_write_kv does in one
pass what norm_heads (twice), rotate and write_kv do in four: the rotated K goes straight to its slot and is never
written to memory in between. All compute in float32 and round once. On the CPU, where the kernels are not interpreted,
the same is done with torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.checks import check_caches, check_scales
from kernels.quantise import LIMITS, as_stored, quantise
from kernels.triton.cache import narrow
from kernels.triton.dispatch import can_run, check_same_device

MAX_NORM_SIZE = 16384
"""Elements of a row that add_norm takes: one program holds a whole row in its registers."""
HEADS = 8
HEADS_WARPS = 2
COLUMNS = 1024


@triton.jit
def add_norm_kernel(
    residual_ptr, x_ptr, weight_ptr, out_ptr, eps,
    H: tl.constexpr, H_PAD: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program: a row. All are contiguous [T, H]."""
    at = tl.arange(0, H_PAD)
    ok = at < H
    row = tl.program_id(0).to(tl.int64) * H + at
    values = tl.load(residual_ptr + row, mask=ok, other=0.0)
    if ADD:
        values += tl.load(x_ptr + row, mask=ok, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row, values, mask=ok)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / H + eps)
    weight = tl.load(weight_ptr + at, mask=ok, other=0.0)
    tl.store(out_ptr + row, (values * scale * weight).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def heads_kernel(
    rows_ptr, positions_ptr, table_ptr, q_norm_ptr, k_norm_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    k_scale_ptr, v_scale_ptr, limit, eps, num_positions, stride_row, stride_block, stride_head, stride_slot,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, QUANTISED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS of its Q + 2 KV heads). The first Q stay in rows; K and V go to the slot of the token.

    Heads are held as their two halves, which RoPE turns against each other. KV = 0: there is nothing but Q heads.
    """
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF_PAD)
    ok = (heads < Q + 2 * KV)[:, None] & (i < half)[None, :]
    at = token * stride_row + heads[:, None] * D + i[None, :]
    left = tl.load(rows_ptr + at, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(rows_ptr + at + half, mask=ok, other=0.0).to(tl.float32)
    is_q, is_v = (heads < Q)[:, None], (heads >= Q + KV)[:, None]
    if NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        scale = tl.where(is_v, 1.0, tl.rsqrt(squares / D + eps)[:, None])
        inside = (i < half)[None, :]
        q_left, q_right = (
            tl.load(q_norm_ptr + i[None, :], mask=inside),
            tl.load(q_norm_ptr + half + i[None, :], mask=inside),
        )
        if KV > 0:
            k_left = tl.load(k_norm_ptr + i[None, :], mask=inside)
            k_right = tl.load(k_norm_ptr + half + i[None, :], mask=inside)
            q_left, q_right = tl.where(is_q, q_left, k_left), tl.where(is_q, q_right, k_right)
        left = tl.where(is_v, left, left * scale * q_left)
        right = tl.where(is_v, right, right * scale * q_right)
    if ROTATE:
        # a position outside of the table, as padding may have, must not become a read outside of it
        position = tl.minimum(tl.maximum(tl.load(positions_ptr + token), 0), num_positions - 1)
        angles = table_ptr + position * D + i[None, :]
        cos = tl.load(angles, mask=(i < half)[None, :], other=0.0)
        sin = tl.load(angles + half, mask=(i < half)[None, :], other=0.0)
        turned = left * cos - right * sin
        right = tl.where(is_v, right, right * cos + left * sin)
        left = tl.where(is_v, left, turned)
    element = rows_ptr.dtype.element_ty
    tl.store(rows_ptr + at, left.to(element), mask=ok & is_q)
    tl.store(rows_ptr + at + half, right.to(element), mask=ok & is_q)
    if KV > 0:
        slot = tl.load(slots_ptr + token)
        is_k = ok & (heads >= Q)[:, None] & (heads < Q + KV)[:, None] & (slot >= 0)
        cached: tl.constexpr = k_cache_ptr.dtype.element_ty
        if QUANTISED:
            head = tl.where(heads >= Q + KV, heads - Q - KV, heads - Q)
            inside = (head >= 0) & (head < KV)
            k_scale = tl.load(k_scale_ptr + head, mask=inside, other=1.0)
            scale = tl.where(heads >= Q + KV, tl.load(v_scale_ptr + head, mask=inside, other=1.0), k_scale)[:, None]
            # rounded to the dtype of the model first, as what write_kv is given has been
            left = narrow(left.to(element), scale, limit, cached)
            right = narrow(right.to(element), scale, limit, cached)
        is_v = ok & is_v & (slot >= 0)
        row = (slot // PAGE) * stride_block + (slot % PAGE) * stride_slot
        k_at = row + (heads - Q).to(tl.int64)[:, None] * stride_head + i[None, :]
        v_at = row + (heads - Q - KV).to(tl.int64)[:, None] * stride_head + i[None, :]
        tl.store(k_cache_ptr + k_at, left.to(cached), mask=is_k)
        tl.store(k_cache_ptr + k_at + half, right.to(cached), mask=is_k)
        tl.store(v_cache_ptr + v_at, left.to(cached), mask=is_v)
        tl.store(v_cache_ptr + v_at + half, right.to(cached), mask=is_v)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, stride_row, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, COLUMNS columns of the result). gate_up [T, 2 SIZE], out contiguous [T, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = at < SIZE
    gate = tl.load(gate_up_ptr + row * stride_row + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_row + SIZE + at, mask=ok, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + at, result.to(out_ptr.dtype.element_ty), mask=ok)


class TritonOps:
    """`dtype`: that of the model's activations. Methods raise ValueError, naming the tensor, for what does not fit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def add_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (float32 [T, H]; x dtype [T, H] or None), then RMSNorm(residual) * weight.

        Returns dtype [T, H]. RMSNorm(r) = r / sqrt(mean(r²) + eps) (Zhang and Sennrich 2019). weight: float32 [H],
        H <= MAX_NORM_SIZE; all are contiguous.
        """
        size = residual.shape[-1]
        if residual.dtype is not torch.float32 or residual.dim() != 2 or not residual.is_contiguous():
            raise ValueError(f"residual must be contiguous float32 [T, H], not {_form(residual)}")
        if x is not None and (x.shape != residual.shape or not x.is_contiguous()):
            raise ValueError(f"x must be contiguous {tuple(residual.shape)} like residual, not {_form(x)}")
        _check_weight("weight", weight, size)
        if size > MAX_NORM_SIZE:
            raise ValueError(f"add_norm takes rows of at most {MAX_NORM_SIZE} elements, not {size}")
        check_same_device(residual=residual, x=x, weight=weight)
        if not can_run(add_norm_kernel, residual):
            if x is not None:
                residual.add_(x)
            return functional.rms_norm(residual, weight.shape, weight, eps).to(self.dtype)
        out = torch.empty(residual.shape, dtype=self.dtype, device=residual.device)
        if out.numel():
            padded = triton.next_power_of_2(size)
            add_norm_kernel[(residual.shape[0],)](
                residual, x, weight, out, eps,
                H=size, H_PAD=padded, ADD=x is not None, num_warps=norm_warps(padded),
            )  # fmt: skip
        return out

    def norm_heads(self, rows: Tensor, first: int, count: int, weight: Tensor, eps: float) -> None:
        """RMSNorm, in place, of heads first .. first + count - 1 of rows dtype [T, n * D]; weight: float32 [D]."""
        head_dim = weight.shape[0]
        _check_weight("weight", weight, head_dim)
        _check_rows(rows, first + count, head_dim)
        check_same_device(rows=rows, weight=weight)
        heads = rows[:, first * head_dim : (first + count) * head_dim]
        if not can_run(heads_kernel, rows):
            grouped = heads.unflatten(1, (count, head_dim))
            grouped.copy_(functional.rms_norm(grouped.float(), weight.shape, weight, eps))
        elif heads.numel():
            _launch_heads(heads, count, head_dim, q_norm=weight, eps=eps)

    def rotate(self, rows: Tensor, count: int, positions: Tensor, table: Tensor) -> None:
        """Turn the first `count` heads of rows dtype [T, n * D], in place, by the angles of positions int64 [T].

        The pair (x_i, x_{i + D/2}) of a head is turned by one angle (Su et al. 2021, RoFormer). table: contiguous
        float32 [num_positions, D], D/2 cosines and then D/2 sines; positions outside of it are taken to its ends.
        """
        head_dim = table.shape[-1]
        _check_rows(rows, count, head_dim)
        _check_angles(rows, positions, table)
        heads = rows[:, : count * head_dim]
        if not can_run(heads_kernel, rows):
            grouped = heads.unflatten(1, (count, head_dim))
            grouped.copy_(_turned(grouped.float(), positions, table))
        elif heads.numel():
            _launch_heads(heads, count, head_dim, positions=positions, table=table)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Norm (if given weights, float32 [D] each) and rotation of Q, in place, and of K; K and V into their slots.

        qkv: dtype [T, (num_heads + 2 num_kv_heads) * D], rows may be strided: Q, K, V of a token one after the other.
        K and V within qkv stay as they were. positions int64 [T], table as for rotate; slots int64 [T], negative:
        write nothing. Caches [num_blocks, num_kv_heads, block_size, D]; a quantised one (`kernels.quantise`) needs
        k_scale and v_scale, float32 [num_kv_heads]. As norm_heads, rotate and write_kv, but for the rounding to dtype
        between them.
        """
        check_caches(k_cache, v_cache)
        check_scales(k_cache, k_scale, v_scale)
        num_kv_heads, page, head_dim = k_cache.shape[1:]
        if qkv.dim() != 2 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
            raise ValueError(
                f"qkv must be [T, ({num_heads} + 2 * {num_kv_heads}) * {head_dim}], not {tuple(qkv.shape)}"
            )
        if table.shape[-1] != head_dim:
            raise ValueError(f"the table of angles is for head_dim {table.shape[-1]}, the caches for {head_dim}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm and k_norm are given together or not at all")
        _check_rows(qkv, num_heads + 2 * num_kv_heads, head_dim)
        _check_angles(qkv, positions, table)
        if slots.dtype is not torch.int64 or slots.shape != positions.shape or slots.stride(0) != 1:
            raise ValueError(f"slots must be contiguous int64 [{len(positions)}], not {_form(slots)}")
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                _check_weight(name, weight, head_dim)
        check_same_device(
            qkv=qkv, k_cache=k_cache, v_cache=v_cache, slots=slots, q_norm=q_norm, k_norm=k_norm, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
        if not len(qkv):
            return
        if can_run(heads_kernel, qkv):
            _launch_heads(
                qkv, num_heads, head_dim, positions=positions, table=table, q_norm=q_norm, k_norm=k_norm, eps=eps,
                k_cache=k_cache, v_cache=v_cache, slots=slots, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            return
        heads = qkv.unflatten(1, (-1, head_dim))
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        wide_q, wide_k = q.float(), k.float()
        if q_norm is not None and k_norm is not None:
            wide_q = functional.rms_norm(wide_q, q_norm.shape, q_norm, eps)
            wide_k = functional.rms_norm(wide_k, k_norm.shape, k_norm, eps)
        q.copy_(_turned(wide_q, positions, table))
        live = slots >= 0
        block, offset = slots[live] // page, slots[live] % page
        new_k = _turned(wide_k, positions, table)
        if k_scale is not None and v_scale is not None:
            new_k = as_stored(quantise(new_k.to(qkv.dtype), k_scale, k_cache.dtype))
            v = as_stored(quantise(v, v_scale, v_cache.dtype))
        k_pool, v_pool = as_stored(k_cache), as_stored(v_cache)
        k_pool[block, :, offset] = new_k[live].to(k_pool.dtype)
        v_pool[block, :, offset] = v[live].to(v_pool.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up dtype [T, 2I], rows may be strided → silu(first half) * second half, dtype [T, I].

        silu(x) = x / (1 + exp(-x)) (SwiGLU, Shazeer 2020).
        """
        if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
            raise ValueError(f"gate_up must be [T, 2I] with contiguous rows, not {_form(gate_up)}")
        if not can_run(silu_and_mul_kernel, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            silu_and_mul_kernel[(num_rows, triton.cdiv(size, COLUMNS))](
                gate_up, out, gate_up.stride(0), SIZE=size, COLUMNS=COLUMNS
            )
        return out


def norm_warps(padded_size: int) -> int:
    """Warps of add_norm's programs: 32 elements a thread; 16 at most, since AMD's have 64 threads, of at most 1024."""
    return min(16, max(1, padded_size // 1024))


def _launch_heads(
    rows: Tensor,
    num_q: int,
    head_dim: int,
    *,
    positions: Tensor | None = None,
    table: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """heads_kernel with what is given: it does no more."""
    num_kv, page = (0, 1) if k_cache is None else (k_cache.shape[1], k_cache.shape[2])
    strides = (0, 0, 0) if k_cache is None else k_cache.stride()[:3]
    heads_kernel[(rows.shape[0], triton.cdiv(num_q + 2 * num_kv, HEADS))](
        rows, positions, table, q_norm, k_norm, slots, k_cache, v_cache,
        k_scale, v_scale, 0.0 if k_cache is None else LIMITS.get(k_cache.dtype, 0.0),
        eps, 0 if table is None else table.shape[0], rows.stride(0), *strides,
        Q=num_q, KV=num_kv, D=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2), PAGE=page,
        NORM=q_norm is not None, ROTATE=table is not None, QUANTISED=k_scale is not None, HEADS=HEADS,
        num_warps=HEADS_WARPS,
    )  # fmt: skip


def _turned(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """heads float32 [T, n, D], turned by the angles of their positions."""
    angles = table[positions.clamp(0, table.shape[0] - 1)].unsqueeze(1)
    cos, sin = angles.chunk(2, dim=-1)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _check_weight(name: str, weight: Tensor, size: int) -> None:
    if weight.dtype is not torch.float32 or weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 [{size}], not {_form(weight)}")


def _check_rows(rows: Tensor, num_heads: int, head_dim: int) -> None:
    if rows.dim() != 2 or rows.stride(1) != 1 or rows.shape[1] < num_heads * head_dim:
        raise ValueError(
            f"rows must be [T, at least {num_heads} * {head_dim}] with contiguous rows, "
            f"not {tuple(rows.shape)} with strides {rows.stride()}"
        )
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} has no two halves")


def _check_angles(rows: Tensor, positions: Tensor, table: Tensor) -> None:
    if positions.dtype is not torch.int64 or positions.shape != rows.shape[:1] or positions.stride(0) != 1:
        raise ValueError(f"positions must be contiguous int64 [{rows.shape[0]}], not {_form(positions)}")
    if table.dtype is not torch.float32 or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"the table of angles must be contiguous float32 [num_positions, D], not {_form(table)}")
    check_same_device(rows=rows, positions=positions, table=table)


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
