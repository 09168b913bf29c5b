"""The Triton backend: shapes checked, work planned once a step, kernels launched; on CPU tensors if interpreted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.checks import check_attention, check_metadata, check_write
from kernels.copying import copy_blocks
from kernels.metadata import AttentionMetadata
from kernels.transfer import to_device
from kernels.triton import interpreter
from kernels.triton.attention import merge_splits_kernel, paged_attention_kernel
from kernels.triton.cache import write_kv_kernel
from kernels.triton.decode_plan import DecodeWork
from kernels.triton.plan import plan_attention
from kernels.triton.tiles import SPLIT_SIZE, Tiles, pick_tiles

INTERPRETED: bool = triton.knobs.runtime.interpret
if INTERPRETED:
    interpreter.install()


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel, and of the merge behind it: work lists on the device."""

    tiles: Tiles
    items: Tensor  # int32 [n, ITEM_FIELDS]
    merges: Tensor  # int32 [m, MERGE_FIELDS]
    num_partials: int


class TritonBackend:
    """Attention over block tables with the kernels of this package. `split_size` in keys."""

    name = "triton"

    def __init__(self, split_size: int = SPLIT_SIZE) -> None:
        self.counters = {"write_kv": 0, "paged_attention": 0, "copy_blocks": 0}
        self.split_size = split_size
        self._hopper = INTERPRETED or torch.cuda.get_device_capability()[0] >= 9
        self._plans: weakref.WeakKeyDictionary[AttentionMetadata, dict[tuple[object, ...], list[Launch]]] = (
            weakref.WeakKeyDictionary()
        )

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        check_write(k, v, k_cache, v_cache, slot_mapping)
        self.counters["write_kv"] += 1
        num_tokens, num_kv_heads, head_dim = k.shape
        if not num_tokens:
            return
        write_kv_kernel[(num_tokens, num_kv_heads)](
            k, v, k_cache, v_cache, slot_mapping,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            D=head_dim, D_PAD=triton.next_power_of_2(head_dim), PAGE=k_cache.shape[2],
        )  # fmt: skip

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor,
    ) -> None:
        check_attention(q, k_cache, v_cache, metadata.num_tokens, window, soft_cap, out)
        num_kv_heads, page, head_dim = k_cache.shape[1:]
        group = q.shape[1] // num_kv_heads
        d_pad = max(16, triton.next_power_of_2(head_dim))
        fp32_dot = q.dtype is torch.float32 or INTERPRETED
        self.counters["paged_attention"] += 1
        for launch in self._launches(metadata, group, head_dim, page, window):
            tiles, device = launch.tiles, q.device
            rows = launch.num_partials * num_kv_heads * tiles.block_m
            partial = torch.empty((rows, d_pad), dtype=torch.float32, device=device)
            partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
            paged_attention_kernel[(len(launch.items), num_kv_heads)](
                q, k_cache, v_cache, out, partial, partial_lse,
                metadata.block_table, metadata.query_start_loc, metadata.seq_lens, launch.items,
                scale, soft_cap or 0.0,
                q.stride(0), q.stride(1), out.stride(0), out.stride(1),
                k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), metadata.block_table.stride(0),
                G=group, D=head_dim, D_PAD=d_pad, PAGE=page, TILE=tiles.tile, BLOCK_M=tiles.block_m,
                WINDOW=window or 0, SOFT_CAP=soft_cap is not None, CONTIGUOUS=tiles.contiguous, FP32_DOT=fp32_dot,
                num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
            if len(launch.merges):
                merge_splits_kernel[(len(launch.merges), num_kv_heads)](
                    partial, partial_lse, out, metadata.query_start_loc, launch.merges,
                    out.stride(0), out.stride(1),
                    G=group, D=head_dim, D_PAD=d_pad, BLOCK_M=tiles.block_m,
                )  # fmt: skip

    def copy_blocks(self, caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        self.counters["copy_blocks"] += 1
        copy_blocks(caches, src, dst)

    def warm_up(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Compile both tile shapes, with and without split, so that no step waits for a compiler."""
        device = torch.device("cpu" if INTERPRETED else "cuda")
        counted = dict(self.counters)
        long = 1 if INTERPRETED else self.split_size + 1
        for query_len, seq_len in ((1, 1), (1, long), (64, 64 + long - 1)):
            num_blocks = -(-seq_len // block_size)
            metadata = AttentionMetadata.build(
                [query_len], [seq_len], [list(range(1, num_blocks + 1))], block_size, device
            )
            cache = torch.zeros((num_blocks + 1, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
            kv = torch.zeros((query_len, num_kv_heads, head_dim), dtype=dtype, device=device)
            q = torch.zeros((query_len, num_q_heads, head_dim), dtype=dtype, device=device)
            self.write_kv(kv, kv, cache, cache, metadata.slot_mapping)
            out = torch.empty_like(q)
            self.paged_attention(q, cache, cache, metadata, scale=1.0, window=window, soft_cap=soft_cap, out=out)
        self.counters.update(counted)

    def plan_decode(
        self,
        *,
        max_seqs: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int | None,
    ) -> BoundDecodePlan:
        """See `kernels.graphs`."""
        key = (num_q_heads // num_kv_heads, head_dim, block_size, window)
        tiles = self._tiles(*key[:3], prefill=False)
        work = DecodeWork(
            max_seqs=max_seqs,
            max_seq_len=max_seq_len,
            tile=tiles.tile,
            split_size=self._split_size(tiles),
            window=window,
            block_q=tiles.block_m // key[0],
        )
        return BoundDecodePlan(self, work, tiles, key)

    def preset(self, metadata: AttentionMetadata, key: tuple[object, ...], launches: list[Launch]) -> None:
        """Attention of this shape (group, head_dim, page, window) under `metadata` launches these."""
        self._plans.setdefault(metadata, {})[key] = launches

    def _tiles(self, group: int, head_dim: int, page: int, *, prefill: bool) -> Tiles:
        return pick_tiles(group_size=group, head_dim=head_dim, page=page, prefill=prefill, hopper=self._hopper)

    def _split_size(self, tiles: Tiles) -> int:
        return -(-self.split_size // tiles.tile) * tiles.tile

    def _launches(
        self, metadata: AttentionMetadata, group: int, head_dim: int, page: int, window: int | None
    ) -> list[Launch]:
        """The launches of a step: decode rows and prefill rows apart. Planned once; the layers of a group share it."""
        plans = self._plans.setdefault(metadata, {})
        key = (group, head_dim, page, window)
        if key in plans:
            return plans[key]
        check_metadata(metadata, page)
        starts = _on_host(metadata.host_query_start_loc, metadata.query_start_loc)
        query_lens = [end - start for start, end in pairwise(starts)][: metadata.num_seqs]
        seq_lens = _on_host(metadata.host_seq_lens, metadata.seq_lens)
        launches = []
        for prefill in (False, True):
            tiles = self._tiles(group, head_dim, page, prefill=prefill)
            sequences = [seq for seq, length in enumerate(query_lens) if length and (length > 1) == prefill]
            if not sequences:
                continue
            work = plan_attention(
                query_lens,
                seq_lens,
                sequences,
                block_q=tiles.block_m // group,
                tile=tiles.tile,
                split_size=self._split_size(tiles),
                window=window,
            )
            device = metadata.seq_lens.device
            launches.append(
                Launch(
                    tiles,
                    to_device(work.items, device),
                    to_device(work.merges, device),
                    work.num_partials,
                )
            )
        plans[key] = launches
        return launches


class BoundDecodePlan:
    """A `kernels.graphs.DecodePlan` over this backend's launches."""

    def __init__(self, backend: TritonBackend, work: DecodeWork, tiles: Tiles, key: tuple[object, ...]) -> None:
        self.num_words = work.num_words
        self._backend = backend
        self._work = work
        self._tiles = tiles
        self._key = key

    def pack(self, seq_lens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return self._work.pack(seq_lens)

    def bind(self, metadata: AttentionMetadata, words: Tensor) -> None:
        if words.dtype is not torch.int32 or words.shape != (self.num_words,) or not words.is_contiguous():
            raise ValueError(f"the work must be contiguous int32 [{self.num_words}], not {words.dtype} {words.shape}")
        work = self._work
        launch = Launch(self._tiles, work.items(words), work.merges(words), work.max_partials)
        self._backend.preset(metadata, self._key, [launch])


def _on_host(host: Tensor | None, device: Tensor) -> list[int]:
    """The values as Python ints, without waiting for the device if they are in host memory too."""
    values: list[int] = (device if host is None else host).tolist()
    return values


def create(num_threads: int | None) -> TritonBackend:
    """The backend; num_threads means nothing to it."""
    return TritonBackend()
