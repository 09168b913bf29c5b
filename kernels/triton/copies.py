"""Whole blocks copied within a pool, and tokens gathered out of it.

    copy_blocks(caches, src, dst)                        # K and V of all layers in one launch
    gather_kv(k_cache, v_cache, slots) -> (k, v)         # paged → dense [T, num_kv_heads, head_dim]; undoes write_kv

Copies count as made all at once: a chain 1 → 2 → 3 gives 3 the old content of 2. Instead of a second copy of every
block on the side, the order is planned (`plan_copies`): who reads a block comes before who overwrites it, and a ring
keeps one block's piece in registers. Each program does that for its own piece of a block, so none waits for another.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels import copying
from kernels.triton.dispatch import can_run, check_same_device

_SAVED = -1
_SAVED_ID = tl.constexpr(_SAVED)
_FIELDS = 3
_CHAIN_FIELDS = tl.constexpr(_FIELDS)
PIECE_BYTES = 8192
GATHERED_ROWS = 16


class CopyPlan(NamedTuple):
    """copies int64 [n, 2]: source (-1: saved block), destination. chains int64 [m, 3]: first copy, end, saved block.

    The copies of a chain are made in order; no chain touches what another writes. -1: there is no block to save.
    """

    copies: NDArray[np.int64]
    chains: NDArray[np.int64]


def plan_copies(src: Sequence[int], dst: Sequence[int]) -> CopyPlan:
    """An order in which copying one after the other gives what copying all at once would.

    Each block has one source, so copies form trees, whose roots are only read, and rings with trees on them. From the
    leaves up, whoever is overwritten has no reader left. Raises ValueError when a block would be overwritten twice.
    """
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} sources for {len(dst)} destinations")
    if len(set(dst)) != len(dst):
        raise ValueError(f"blocks {sorted(b for b, n in Counter(dst).items() if n > 1)} are destinations twice")
    source = {d: s for s, d in zip(src, dst, strict=True) if s != d}
    readers = Counter(source.values())
    ready = [d for d in source if not readers[d]]
    order = []  # destinations, leaves first
    while ready:
        d = ready.pop()
        order.append(d)
        s = source[d]
        readers[s] -= 1
        if not readers[s] and s in source:
            ready.append(s)

    chains: list[list[tuple[int, int]]] = []
    saved: list[int] = []
    chain_of: dict[int, int] = {}
    rings = dict.fromkeys(source)  # what is left when the trees are taken off
    for d in order:
        del rings[d]
    ring_copies: dict[int, list[tuple[int, int]]] = {}
    for first in rings:
        if first in chain_of:
            continue
        ring = [first]
        while source[ring[-1]] != first:
            ring.append(source[ring[-1]])
        number = len(chains)
        chain_of |= dict.fromkeys(ring, number)
        ring_copies[number] = [*((source[d], d) for d in ring[:-1]), (_SAVED, ring[-1])]
        chains.append([])
        saved.append(first)
    for d in reversed(order):  # from the roots down: a tree below a root's child is a chain of its own
        if source[d] not in chain_of:
            chain_of[d] = len(chains)
            chains.append([])
            saved.append(_SAVED)
        else:
            chain_of[d] = chain_of[source[d]]
    for d in order:
        chains[chain_of[d]].append((source[d], d))
    for number, copies in ring_copies.items():
        chains[number] += copies

    ends = np.cumsum([len(chain) for chain in chains], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]) if len(ends) else ends
    return CopyPlan(
        np.array([copy for chain in chains for copy in chain], dtype=np.int64).reshape(-1, 2),
        np.stack([starts, ends, np.array(saved, dtype=np.int64)], axis=1).reshape(-1, _FIELDS),
    )


@triton.jit
def copy_blocks_kernel(
    caches_ptr, copies_ptr, chains_ptr, stride_block, num_words,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program (chain, piece of a block, cache). caches int64 [n]: addresses; stride_block, num_words: in WORDs."""
    chain = chains_ptr + tl.program_id(0).to(tl.int64) * _CHAIN_FIELDS
    first, end, saved_id = tl.load(chain), tl.load(chain + 1), tl.load(chain + 2)
    cache = tl.load(caches_ptr + tl.program_id(2)).to(tl.pointer_type(WORD))
    if ALIGNED:  # an address out of memory is otherwise believed to be odd, and read by single words
        cache = tl.multiple_of(cache, 16)
    word = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = word < num_words
    stride = stride_block.to(tl.int64)
    saved = tl.load(cache + tl.maximum(saved_id, 0) * stride + word, mask=inside & (saved_id >= 0), other=0)
    for at in range(first, end):
        source, destination = tl.load(copies_ptr + 2 * at), tl.load(copies_ptr + 2 * at + 1)
        piece = tl.load(cache + tl.maximum(source, 0) * stride + word, mask=inside & (source >= 0), other=0)
        piece = tl.where(source == _SAVED_ID, saved, piece)
        tl.store(cache + destination * stride + word, piece, mask=inside)
        tl.debug_barrier()  # what one warp wrote, another may read in the next copy


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def gather_kv_kernel(
    k_cache_ptr, v_cache_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    stride_block, stride_head, stride_slot, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS tokens, KV head): neighbours in a block are neighbours in memory."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    inside = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1)
    d = tl.arange(0, D_PAD)
    d_ok = (d < D)[None, :]
    live = (slot >= 0)[:, None] & d_ok
    at = ((slot // PAGE) * stride_block + (slot % PAGE) * stride_slot)[:, None] + head * stride_head + d[None, :]
    k = tl.load(k_cache_ptr + at, mask=live, other=0.0)
    v = tl.load(v_cache_ptr + at, mask=live, other=0.0)
    if SCALED:
        k = k.to(tl.float32) * tl.load(k_scale_ptr + head)
        v = v.to(tl.float32) * tl.load(v_scale_ptr + head)
    written = inside[:, None] & d_ok
    k_at = token[:, None] * stride_k_token + head * stride_k_head + d[None, :]
    v_at = token[:, None] * stride_v_token + head * stride_v_head + d[None, :]
    tl.store(k_ptr + k_at, k.to(k_ptr.dtype.element_ty), mask=written)
    tl.store(v_ptr + v_at, v.to(v_ptr.dtype.element_ty), mask=written)


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """In each cache, blocks dst[i] become copies of src[i] (int64 [n]), as if all at once; dst are distinct.

    caches: [num_blocks, ...] alike in shape, strides and dtype, each block contiguous. src and dst should be in host
    memory: the order of copies is planned there, and elsewhere they have to be waited for. Raises ValueError.
    """
    check_alike(caches)
    if src.dtype is not torch.int64 or dst.dtype is not torch.int64 or src.dim() != 1 or src.shape != dst.shape:
        raise ValueError(
            f"src and dst must be int64 [n], not {src.dtype} {tuple(src.shape)} and {dst.dtype} {tuple(dst.shape)}"
        )
    if not caches or not len(src):
        return
    if not can_run(copy_blocks_kernel, caches[0]):
        copying.copy_blocks(caches, src.to(caches[0].device), dst.to(caches[0].device))
        return
    sources, destinations = src.tolist(), dst.tolist()
    num_blocks = caches[0].shape[0]
    if not all(0 <= block < num_blocks for block in sources + destinations):
        raise ValueError(f"copies {sources} → {destinations} name blocks outside of the cache's {num_blocks}")
    plan = plan_copies(sources, destinations)
    if not len(plan.copies):
        return
    device = caches[0].device
    block_bytes = caches[0][0].numel() * caches[0].itemsize
    stride_bytes = caches[0].stride(0) * caches[0].itemsize
    word_bytes, word = next(
        (size, word) for size, word in _WORDS if block_bytes % size == 0 and stride_bytes % size == 0
    )
    addresses = tuple(cache.data_ptr() for cache in caches)
    piece = min(PIECE_BYTES, triton.next_power_of_2(block_bytes)) // word_bytes
    copy_blocks_kernel[(len(plan.chains), triton.cdiv(block_bytes, piece * word_bytes), len(caches))](
        _address_table(addresses, device),
        torch.from_numpy(plan.copies).to(device), torch.from_numpy(plan.chains).to(device),
        stride_bytes // word_bytes, block_bytes // word_bytes,
        WORD=word, ALIGNED=all(address % 16 == 0 for address in (*addresses, stride_bytes)), PIECE=piece,
    )  # fmt: skip


_WORDS: tuple[tuple[int, Any], ...] = ((4, tl.int32), (2, tl.int16), (1, tl.int8))


@functools.lru_cache(maxsize=16)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] on the device; the caches of a worker never move, so it is copied there once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def check_alike(caches: Sequence[Tensor]) -> None:
    """ValueError unless all caches have one shape, strides, dtype and device, and blocks that are contiguous."""
    for index, cache in enumerate(caches):
        first = caches[0]
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(
                f"cache {index} is {tuple(cache.shape)} {cache.dtype} with strides {cache.stride()}, "
                f"cache 0 {tuple(first.shape)} {first.dtype} with {first.stride()}"
            )
        if cache.dim() < 2 or not cache[:1].is_contiguous():
            raise ValueError(f"the blocks of cache {index} are not contiguous: strides {cache.stride()}")
    check_same_device(**{f"cache {index}": cache for index, cache in enumerate(caches)})


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of `slots` (int64 [T]) as dense [T, num_kv_heads, D]; a negative slot gives zeros.

    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, D], D contiguous, else strided at will (a sliced pool).
    k_scale, v_scale: float32 [num_kv_heads], both or none: what the cached values are multiplied by (quantised
    caches). dtype: of the result, else that of the cache, or float32 if it is scaled. Raises ValueError.
    """
    if k_cache.dim() != 4 or (k_cache.shape, k_cache.stride(), k_cache.dtype) != (
        v_cache.shape, v_cache.stride(), v_cache.dtype,
    ):  # fmt: skip
        raise ValueError(
            "caches must be alike, [num_blocks, num_kv_heads, block_size, head_dim]; "
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if k_cache.stride(3) != 1:
        raise ValueError("the last dimension of the caches must be contiguous")
    if slots.dtype is not torch.int64 or slots.dim() != 1 or slots.stride(0) != 1:
        raise ValueError(f"slots must be contiguous int64 [T], not {slots.dtype} {tuple(slots.shape)}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale are given together or not at all")
    num_heads, page, head_dim = k_cache.shape[1:]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (
            scale.dtype is not torch.float32 or scale.shape != (num_heads,) or not scale.is_contiguous()
        ):
            raise ValueError(f"{name} must be float32 [{num_heads}], not {scale.dtype} {tuple(scale.shape)}")
    check_same_device(k_cache=k_cache, v_cache=v_cache, slots=slots, k_scale=k_scale, v_scale=v_scale)
    dtype = dtype or (k_cache.dtype if k_scale is None else torch.float32)
    k, v = (torch.empty((len(slots), num_heads, head_dim), dtype=dtype, device=slots.device) for _ in range(2))
    if not k.numel():
        return k, v
    if not can_run(gather_kv_kernel, k_cache):
        return _gather_with_torch(k_cache, slots, k_scale, k), _gather_with_torch(v_cache, slots, v_scale, v)
    gather_kv_kernel[(triton.cdiv(len(slots), GATHERED_ROWS), num_heads)](
        k_cache, v_cache, slots, k, v, k_scale, v_scale, len(slots),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        D=head_dim, D_PAD=triton.next_power_of_2(head_dim), PAGE=page, SCALED=k_scale is not None, ROWS=GATHERED_ROWS,
    )  # fmt: skip
    return k, v


def _gather_with_torch(cache: Tensor, slots: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    page = cache.shape[2]
    live = slots >= 0
    where = torch.where(live, slots, 0)
    values = cache[where // page, :, where % page]  # [T, num_kv_heads, D]
    if scale is not None:
        values = values.float() * scale[:, None]
    return out.copy_(torch.where(live[:, None, None], values.to(out.dtype), torch.zeros((), dtype=out.dtype)))
