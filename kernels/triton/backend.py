"""The Triton backend: shapes checked, work planned once a step, kernels launched; on CPU tensors if interpreted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.checks import check_attention, check_metadata, check_write
from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS
from kernels.slots import MapSlots
from kernels.transfer import to_device
from kernels.triton import interpreter
from kernels.triton.attention import merge_splits_kernel, paged_attention_kernel
from kernels.triton.cache import write_kv_kernel
from kernels.triton.copies import copy_blocks
from kernels.triton.decode_plan import DecodeWork
from kernels.triton.elementwise import TritonOps
from kernels.triton.plan import plan_attention
from kernels.triton.slots import SlotMapper
from kernels.triton.tiles import LONG_ROWS, SPLIT_SIZE, WRITE_TILE, Kind, Tiles, merge_warps, pick_tiles

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


class StepShape(NamedTuple):
    """What, besides its metadata, the work list of a step depends on."""

    group: int  # query heads of a KV head
    head_dim: int
    page: int  # slots of a block
    window: int | None
    causal: bool = True
    kv_bytes: int = 2  # an element of the cache


class TritonBackend:
    """Attention over block tables with the kernels of this package. `split_size` in keys."""

    name = "triton"

    def __init__(self, split_size: int = SPLIT_SIZE) -> None:
        self.counters = {"write_kv": 0, "rotate_and_write_kv": 0, "paged_attention": 0, "copy_blocks": 0}
        self.split_size = split_size
        self.warms_splits = not INTERPRETED  # thousands of keys take the interpreter seconds, and nothing is compiled
        # AMD's GPUs have such numbers too, but neither wgmma nor the shared memory of a Hopper
        self._hopper = INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9)
        self._plans: weakref.WeakKeyDictionary[AttentionMetadata, dict[StepShape, list[Launch]]] = (
            weakref.WeakKeyDictionary()
        )
        self._recorded: weakref.WeakSet[AttentionMetadata] = weakref.WeakSet()

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        check_write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        self.counters["write_kv"] += 1
        num_tokens, num_kv_heads, head_dim = k.shape
        if not num_tokens:
            return
        d_pad = triton.next_power_of_2(head_dim)
        heads = min(triton.next_power_of_2(num_kv_heads), max(1, WRITE_TILE // d_pad))
        write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
            k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, LIMITS.get(k_cache.dtype, 0.0),
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            H=num_kv_heads, HEADS=heads, D=head_dim, D_PAD=d_pad, PAGE=k_cache.shape[2],
            QUANTISED=k_cache.dtype in LIMITS,
        )  # fmt: skip

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """See `kernels.fusion`."""
        self.counters["rotate_and_write_kv"] += 1
        TritonOps(qkv.dtype).rotate_and_write_kv(
            qkv, num_heads, positions, table, k_cache, v_cache, slot_mapping,
            q_norm=q_norm, k_norm=k_norm, eps=eps, k_scale=k_scale, v_scale=v_scale,
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
        causal: bool = True,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor,
    ) -> None:
        check_attention(
            q, k_cache, v_cache, metadata.num_tokens, window, soft_cap, out,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        num_kv_heads, page, head_dim = k_cache.shape[1:]
        group = q.shape[1] // num_kv_heads
        d_pad = max(16, triton.next_power_of_2(head_dim))
        self.counters["paged_attention"] += 1
        shape = StepShape(group, head_dim, page, window, causal, k_cache.dtype.itemsize)
        for launch in self._launches(metadata, shape):
            tiles, device = launch.tiles, q.device
            rows = launch.num_partials * num_kv_heads * tiles.block_m
            partial = torch.empty((rows, d_pad), dtype=torch.float32, device=device)
            partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
            paged_attention_kernel[(len(launch.items), num_kv_heads)](
                q, k_cache, v_cache, out, partial, partial_lse,
                metadata.block_table, metadata.query_start_loc, metadata.seq_lens, launch.items,
                sinks, k_scale, v_scale, scale, soft_cap or 0.0,
                q.stride(0), q.stride(1), out.stride(0), out.stride(1),
                k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), metadata.block_table.stride(0),
                G=group, D=head_dim, D_PAD=d_pad, PAGE=page, TILE=tiles.tile, BLOCK_M=tiles.block_m,
                WINDOW=window or 0, CAUSAL=causal, SOFT_CAP=soft_cap is not None, CONTIGUOUS=tiles.contiguous,
                SINKS=sinks is not None, QUANTISED=k_scale is not None,
                num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
            if len(launch.merges):
                merge_splits_kernel[(len(launch.merges), num_kv_heads)](
                    partial, partial_lse, out, metadata.query_start_loc, launch.merges,
                    out.stride(0), out.stride(1),
                    G=group, D=head_dim, D_PAD=d_pad, BLOCK_M=tiles.block_m,
                    num_warps=merge_warps(tiles.block_m, d_pad),
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
        causal: bool = True,
        sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Compile all tile shapes, with and without split, so that no step waits for a compiler."""
        device = torch.device("cpu" if INTERPRETED else "cuda")
        counted = dict(self.counters)
        context = self.split_size if self.warms_splits else 0
        scale = torch.ones(num_kv_heads, device=device) if kv_dtype in LIMITS else None
        for query_len in (1, 2, -(-LONG_ROWS // (num_q_heads // num_kv_heads))):
            for seq_len in sorted({query_len, query_len + context}):
                num_blocks = -(-seq_len // block_size)
                metadata = AttentionMetadata.build(
                    [query_len], [seq_len], [list(range(1, num_blocks + 1))], block_size, device
                )
                shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
                cache = torch.zeros(shape, dtype=kv_dtype or dtype, device=device)
                width = num_q_heads + 2 * num_kv_heads  # one buffer, as from a fused projection
                qkv = torch.zeros((query_len, width, head_dim), dtype=dtype, device=device)
                q, k, v = qkv.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
                self.write_kv(k, v, cache, cache, metadata.slot_mapping, scale, scale)
                self.paged_attention(
                    q, cache, cache, metadata, scale=1.0, window=window, soft_cap=soft_cap, causal=causal,
                    sinks=torch.zeros(num_q_heads, device=device) if sinks else None, k_scale=scale, v_scale=scale,
                    out=torch.empty((query_len, num_q_heads, head_dim), dtype=dtype, device=device),
                )  # fmt: skip
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
        kv_bytes: int = 2,
    ) -> BoundDecodePlan:
        """See `kernels.graphs`."""
        shape = StepShape(num_q_heads // num_kv_heads, head_dim, block_size, window, kv_bytes=kv_bytes)
        tiles = self._tiles(shape, Kind.DECODE)
        work = DecodeWork(
            max_seqs=max_seqs,
            max_seq_len=max_seq_len,
            tile=tiles.tile,
            split_size=self._split_size(tiles),
            window=window,
            block_q=tiles.block_m // shape.group,
        )
        return BoundDecodePlan(self, work, tiles, shape)

    def slot_mapper(self, tables: Sequence[Tensor], block_sizes: Sequence[int]) -> MapSlots:
        """See `kernels.slots`."""
        mapper = SlotMapper(tables, block_sizes)
        self.counters.setdefault("slot_mapping", 0)

        def map_slots(
            rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slots: Tensor, positions: Tensor
        ) -> None:
            self.counters["slot_mapping"] += 1
            mapper(rows, query_start_loc, seq_lens, slots, positions)

        return map_slots

    def preset(self, metadata: AttentionMetadata, shape: StepShape, launches: list[Launch]) -> None:
        """Attention of this shape under `metadata` launches these, and no other shape may ask: a recording must not
        plan on the host."""
        self._recorded.add(metadata)
        self._plans.setdefault(metadata, {})[shape] = launches

    def _split_size(self, tiles: Tiles) -> int:
        return -(-self.split_size // tiles.tile) * tiles.tile

    def _launches(self, metadata: AttentionMetadata, shape: StepShape) -> list[Launch]:
        """The launches of a step, by tile shape. Planned once; the layers of a group share it."""
        plans = self._plans.setdefault(metadata, {})
        if shape in plans:
            return plans[shape]
        if metadata in self._recorded:
            raise ValueError(f"no decode plan of {shape} was bound to this metadata, only of {list(plans)}")
        check_metadata(metadata, shape.page)
        starts = np.asarray(_on_host(metadata.host_query_start_loc, metadata.query_start_loc))
        query_lens = np.diff(starts)[: metadata.num_seqs]
        seq_lens = _on_host(metadata.host_seq_lens, metadata.seq_lens)
        kinds = np.where(query_lens * shape.group < LONG_ROWS, Kind.PREFILL, Kind.LONG_PREFILL)
        kinds[query_lens == 1] = Kind.DECODE
        kinds[query_lens == 0] = -1
        sequences: dict[Tiles, list[int]] = {}
        for kind in Kind:
            chosen = np.flatnonzero(kinds == kind).tolist()
            if chosen:
                sequences.setdefault(self._tiles(shape, kind), []).extend(chosen)
        launches = []
        for tiles, chosen in sequences.items():
            work = plan_attention(
                query_lens,
                seq_lens,
                chosen,
                block_q=tiles.block_m // shape.group,
                tile=tiles.tile,
                split_size=self._split_size(tiles),
                window=shape.window,
                causal=shape.causal,
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
        plans[shape] = launches
        return launches

    def _tiles(self, shape: StepShape, kind: Kind) -> Tiles:
        return pick_tiles(
            group_size=shape.group,
            head_dim=shape.head_dim,
            page=shape.page,
            kind=kind,
            kv_bytes=shape.kv_bytes,
            hopper=self._hopper,
        )


class BoundDecodePlan:
    """A `kernels.graphs.DecodePlan` over this backend's launches."""

    def __init__(self, backend: TritonBackend, work: DecodeWork, tiles: Tiles, shape: StepShape) -> None:
        self.num_words = work.num_words
        self._backend = backend
        self._work = work
        self._tiles = tiles
        self._shape = shape

    def pack(self, seq_lens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return self._work.pack(seq_lens)

    def bind(self, metadata: AttentionMetadata, words: Tensor) -> None:
        if words.dtype is not torch.int32 or words.shape != (self.num_words,) or not words.is_contiguous():
            raise ValueError(f"the work must be contiguous int32 [{self.num_words}], not {words.dtype} {words.shape}")
        work = self._work
        launch = Launch(self._tiles, work.items(words), work.merges(words), work.max_partials)
        self._backend.preset(metadata, self._shape, [launch])


def _on_host(host: Tensor | None, device: Tensor) -> list[int]:
    """The values as Python ints, without waiting for the device if they are in host memory too."""
    values: list[int] = (device if host is None else host).tolist()
    return values


def create(num_threads: int | None) -> TritonBackend:
    """The backend; num_threads means nothing to it."""
    return TritonBackend()
