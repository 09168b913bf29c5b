"""The `cpu` backend: checks tensors, hands their addresses to the compiled kernels, shares work out among threads.

One compiled kernel serves every shape, dtype and batch, so a step never waits for a compiler once warm_up has run.
Attention is work for a `team.Team`, which layers may use too; who computes an item does not change its result.

The layers of a step differ in nothing but addresses. So what tensors look like is checked for the first of them, and
for the others, compared: thirty times a step, checks would take as long as a layer's attention of a few sequences.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from kernels.checks import check_attention, check_metadata, check_rotate_and_write, check_write
from kernels.copying import copy_blocks
from kernels.cpu import attention, rotary
from kernels.cpu.cache_ops import write_rows
from kernels.cpu.plan import WorkPlan
from kernels.cpu.tape import Tape
from kernels.cpu.team import Team
from kernels.cpu.vectors import BF16, F16, F32, LANES
from kernels.metadata import AttentionMetadata

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
# What a step says to all of its layers alike; first what went wrong.
_ATTENTION_VARIES = [attention.BAD_SEQ, attention.PRESENT, *range(attention.Q_TOKEN, len(attention.WORDS))]
_ROTATION_VARIES = [rotary.BAD_TOKEN, *range(rotary.POSITIONS, len(rotary.WORDS))]
_NOTHING: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


class CpuBackend:
    name = "cpu"

    def __init__(self, num_threads: int | None = None, team: Team | None = None) -> None:
        """num_threads: how many cores attention may use; None = all. Or the team that computes it."""
        self.team = team or Team((os.cpu_count() or 1) if num_threads is None else num_threads)
        self.counters = {"write_kv": 0, "rotate_and_write_kv": 0, "paged_attention": 0, "copy_blocks": 0}
        self._attend_arguments = np.zeros(len(attention.WORDS), dtype=np.int64)
        self._attend_address = self._attend_arguments.ctypes.data
        self._plan = WorkPlan()
        self._rotate_arguments = np.zeros(len(rotary.WORDS), dtype=np.int64)
        self._rotate_address = self._rotate_arguments.ctypes.data
        # Of the last paged_attention and the last rotate_and_write_kv: what was checked, and what follows from it. The
        # tensors are held, so that no others can take their places in memory and be taken for them.
        self._attended_metadata: AttentionMetadata | None = None
        self._attended: tuple = ()
        self._rotated_by = _NOTHING
        self._rotated: tuple = ()

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
        _refuse_cache(k_cache)
        if k.dtype != k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(k_cache.dtype)
        self.counters["write_kv"] += 1
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        item = k.element_size()
        bad_token = write_rows(
            k.data_ptr(), k.stride(0) * item, k.stride(1) * item,
            v.data_ptr(), v.stride(0) * item, v.stride(1) * item,
            k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(),
            k.shape[0], num_blocks * block_size, num_kv_heads, block_size, head_dim * item,
        )  # fmt: skip
        if bad_token >= 0:
            raise _no_such_slot(bad_token, slot_mapping, k_cache)

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
        """See `kernels.fusion`. Rounded once, after norm and rotation."""
        form = (
            qkv.shape, qkv.stride(), qkv.dtype, qkv.is_cpu, num_heads,
            k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.dtype,
            q_norm is None, k_norm is None, eps, k_scale is None, v_scale is None,
        )  # fmt: skip
        last_positions, last_table, last_slots = self._rotated_by
        if (
            positions is not last_positions or table is not last_table or slot_mapping is not last_slots
            or form != self._rotated
        ):  # fmt: skip
            self._rotated_by = _NOTHING
            check_rotate_and_write(
                qkv, num_heads, positions, table, k_cache, v_cache, slot_mapping, q_norm, k_norm, k_scale, v_scale
            )
            _refuse_cache(k_cache)
            self._prepare_rotation(qkv, num_heads, positions, table, k_cache, slot_mapping, eps)
            self._rotated_by, self._rotated = (positions, table, slot_mapping), form
        self.counters["rotate_and_write_kv"] += 1
        q_weight, k_weight = (0, 0) if q_norm is None or k_norm is None else (q_norm.data_ptr(), k_norm.data_ptr())
        arguments = self._rotate_arguments
        arguments[rotary.QKV : rotary.K_NORM + 1] = (
            qkv.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), q_weight, k_weight
        )  # fmt: skip
        if self.team.tape is not None:
            self.team.tape.add(
                rotary.ROTATE, arguments, rows=rotary.NUM_TOKENS, name="rotation", varying=_ROTATION_VARIES,
                keep=(qkv, k_cache, v_cache, table, q_norm, k_norm),
            )  # fmt: skip
        self.team.alone(rotary.ROTATE, self._rotate_address)
        if arguments[rotary.BAD_TOKEN] >= 0:
            raise _no_such_slot(int(arguments[rotary.BAD_TOKEN]), slot_mapping, k_cache)

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
        form = (
            q.shape, q.stride(), q.dtype, q.is_cpu, out.shape, out.stride(), out.dtype,
            k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.dtype,
            scale, window, soft_cap, causal, sinks is None, k_scale is None, v_scale is None,
        )  # fmt: skip
        if metadata is not self._attended_metadata or form != self._attended:
            self._attended_metadata = None
            check_attention(
                q, k_cache, v_cache, metadata.num_tokens, window, soft_cap, out,
                sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            _refuse_cache(k_cache)
            if sinks is not None or not causal:
                raise ValueError("the cpu backend has no sinks and is always causal")
            self._prepare_attention(q, k_cache, metadata, scale, window, soft_cap, out)
            self._attended_metadata, self._attended = metadata, form
        self.counters["paged_attention"] += 1
        arguments = self._attend_arguments
        arguments[attention.COUNTER : attention.BAD_SEQ + 1] = (0, self._plan.bad_seq)
        arguments[attention.Q : attention.V_CACHE + 1] = (
            q.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        )  # fmt: skip
        if self.team.tape is not None:
            self.team.tape.add(
                attention.ATTEND, arguments, shared=True, name="attention", varying=_ATTENTION_VARIES,
                keep=(q, k_cache, v_cache, out),
            )  # fmt: skip
        self.team.run(attention.ATTEND, self._attend_address)
        if arguments[attention.BAD_SEQ] >= 0:
            raise _no_such_block(int(arguments[attention.BAD_SEQ]), k_cache.shape[0])

    def replay(self, tape: Tape, num_tokens: int) -> None:
        """Play what was recorded of a step's layers, for another step whose first layer has just been computed here:
        what attention, rotation and cache writes were told there holds for the others, but for addresses of a layer.

        Raises ValueError, as those do.
        """
        tape.put_rows(num_tokens)
        tape.put("rotation", self._rotate_arguments[_ROTATION_VARIES])
        tape.put("attention", self._attend_arguments[_ATTENTION_VARIES])
        self.team.play(tape)
        bad_tokens, bad_seqs = tape.get("rotation")[:, 0], tape.get("attention")[:, 0]
        self.counters["rotate_and_write_kv"] += len(bad_tokens)
        self.counters["paged_attention"] += len(bad_seqs)
        if (token := int(bad_tokens.max())) >= 0:
            raise ValueError(f"token {token} has a slot that the cache lacks")
        if (seq := int(bad_seqs.max())) >= 0:
            raise _no_such_block(seq, int(self._attend_arguments[attention.NUM_BLOCKS]))

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
        """Compile (or load from the disk cache) all kernels, touch the scratch memory."""
        counted = dict(self.counters)
        seq_len = block_size + 1
        metadata = AttentionMetadata.build([seq_len], [seq_len], [[1, 2]], block_size)
        k_cache = torch.zeros((3, num_kv_heads, block_size, head_dim), dtype=dtype)
        v_cache = torch.zeros_like(k_cache)
        k = torch.zeros((seq_len, num_kv_heads, head_dim), dtype=dtype)
        q = torch.zeros((seq_len, num_q_heads, head_dim), dtype=dtype)
        self.write_kv(k, k, k_cache, v_cache, metadata.slot_mapping)
        self.rotate_and_write_kv(
            torch.zeros((seq_len, (num_q_heads + 2 * num_kv_heads) * head_dim), dtype=dtype), num_q_heads,
            torch.zeros(seq_len, dtype=torch.int64), torch.zeros((1, head_dim)), k_cache, v_cache,
            metadata.slot_mapping,
        )  # fmt: skip
        self.paged_attention(
            q, k_cache, v_cache, metadata, scale=1.0, window=window, soft_cap=soft_cap, out=torch.empty_like(q)
        )
        self.counters.update(counted)

    def close(self) -> None:
        """End the team's threads. The backend can still be used, by the caller alone."""
        self.team.close()

    def _prepare_rotation(
        self, qkv: Tensor, num_heads: int, positions: Tensor, table: Tensor, k_cache: Tensor, slots: Tensor, eps: float
    ) -> None:
        """The arguments of ROTATE but for a layer's addresses. Raises ValueError."""
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        if qkv.dtype != k_cache.dtype or head_dim % LANES or not qkv.is_cpu:
            raise ValueError(
                f"the cpu backend needs qkv ({qkv.dtype}) and cache ({k_cache.dtype}) alike, on the CPU, not "
                f"{qkv.device}, and a head_dim that is a multiple of {LANES}, not {head_dim}"
            )
        self.team.reserve(rotary.scratch_bytes(head_dim))
        item = qkv.element_size()
        self._rotate_arguments[rotary.POSITIONS : rotary.EPS] = (
            positions.data_ptr(), slots.data_ptr(), table.data_ptr(), qkv.stride(0) * item, KINDS[qkv.dtype], item,
            qkv.shape[0], num_heads, num_kv_heads, head_dim, table.shape[0], num_blocks * block_size, block_size,
        )  # fmt: skip
        self._rotate_arguments[rotary.EPS :].view(np.float64)[:] = eps

    def _prepare_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: Tensor,
    ) -> None:
        """The arguments of `attend` but for a layer's addresses. Raises ValueError."""
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        if q.dtype != k_cache.dtype or q.dtype not in KINDS or head_dim % LANES or not q.is_cpu:
            raise ValueError(
                f"the cpu backend needs q ({q.dtype}) and cache ({k_cache.dtype}) alike, one of "
                f"{', '.join(map(str, KINDS))}, on the CPU, not {q.device}, and a head_dim that is a multiple "
                f"of {LANES}, not {head_dim}"
            )
        check_metadata(metadata, block_size)
        group = q.shape[1] // num_kv_heads
        rows = attention.rows_of(group)
        item = q.element_size()
        table = metadata.block_table
        self._plan.make(metadata, block_size, rows // group, num_kv_heads, self.team.max_threads, window or 0)
        self.team.reserve(attention.scratch_bytes(group, head_dim))
        self._attend_arguments[attention.PRESENT] = self.team.present
        self._attend_arguments[attention.Q_TOKEN : attention.SCALE] = (
            q.stride(0) * item, q.stride(1) * item, out.stride(0) * item, out.stride(1) * item,
            num_blocks, num_kv_heads, block_size, head_dim, KINDS[q.dtype], item, group, rows,
            self._plan.items, self._plan.tokens, self._plan.num_items, table.data_ptr(), table.stride(0) * 4,
        )  # fmt: skip
        self._attend_arguments[attention.SCALE :].view(np.float64)[:] = (scale, soft_cap or 0.0)


def _no_such_block(seq: int, num_blocks: int) -> ValueError:
    return ValueError(
        f"sequence {seq} names a block outside of the cache's {num_blocks}, "
        "or has more tokens than its block table or the step"
    )


def _no_such_slot(token: int, slot_mapping: Tensor, k_cache: Tensor) -> ValueError:
    num_slots = k_cache.shape[0] * k_cache.shape[2]
    return ValueError(f"token {token} has slot {slot_mapping[token].item()}; the cache has {num_slots}")


def _refuse_cache(cache: Tensor) -> None:
    if cache.dtype not in KINDS or not cache.is_contiguous():
        raise ValueError(
            f"the cpu backend needs a contiguous cache of {', '.join(map(str, KINDS))}; this one is {cache.dtype} "
            f"with strides {cache.stride()}"
        )


def create(num_threads: int | None) -> CpuBackend:
    return CpuBackend(num_threads)
