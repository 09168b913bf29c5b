"""Every form in which serving calls a kernel of this package: the list that `compile_check` compiles.

A form that is not in the list is not shipped: what nobody compiles ahead, nobody vouches for. Models of other head
sizes run too, but within no budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource

from kernels.triton import copies, elementwise, slots, states
from kernels.triton.attention import merge_splits_kernel, paged_attention_kernel
from kernels.triton.budgets import TARGETS, Target
from kernels.triton.cache import write_kv_kernel
from kernels.triton.tiles import WRITE_TILE, Kind, merge_warps, pick_tiles

Types = dict[str, str | None]
MERGE, _EIGHT_BIT, _FP32 = " merge", " 8-bit", " fp32"
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FLOATS = frozenset({"scale", "soft_cap", "eps", "limit"})
"""Arguments of kernels that are float32; every other that is no pointer is an integer."""


def _all(type_: str | None, *names: str) -> Types:
    return dict.fromkeys(names, type_)


@dataclass(frozen=True)
class Call:
    """A kernel as its wrapper calls it. types: of pointers; None stands for an argument not given.

    tile_elements: of K in one tile, if there are tiles.
    """

    kernel: Any
    types: Types
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    tile_elements: int = 0

    def source(self) -> tuple[ASTSource, dict[str, int]]:
        """For `triton.compile`. As in serving, pointers and strides are known to be multiples of 16, counts are not."""
        absent = {name: None for name, type_ in self.types.items() if type_ is None}
        constants = self.constants | absent
        signature, attributes = {}, {}
        for index, parameter in enumerate(self.kernel.params):
            name = parameter.name
            if name in constants:
                signature[name] = "constexpr"
                continue
            signature[name] = self.types.get(name) or ("fp32" if name in _FLOATS else "i32")
            free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if not free and signature[name] != "fp32":
                attributes[(index,)] = [["tt.divisibility", 16]]
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return ASTSource(self.kernel, signature, constants, attributes), options


@dataclass(frozen=True)
class Variant:
    """kind: a row of the budgets. call: how the kernel is called on a target. targets: those it is shipped for."""

    kind: str
    label: str
    call: Callable[[Target], Call]
    targets: frozenset[str] = frozenset(TARGETS)

    def __str__(self) -> str:
        return f"{self.kind.removesuffix(_EIGHT_BIT).removesuffix(_FP32)} {self.label}"  # the label says that too


_KINDS = {"decode": Kind.DECODE, "prefill": Kind.PREFILL, "long prefill": Kind.LONG_PREFILL}


@dataclass(frozen=True)
class Heads:
    """A model's attention, and its cache. kv_dtype: of a quantised cache."""

    dtype: str
    head_dim: int
    group: int
    page: int
    window: int = 0
    soft_cap: bool = False
    kv_dtype: str = ""
    sinks: bool = False
    causal: bool = True

    def __str__(self) -> str:
        text = f"{self.dtype} D={self.head_dim} G={self.group} page {self.page}"
        text += (f" window {self.window}" if self.window else "") + (" soft cap" if self.soft_cap else "")
        text += (f" cache {self.kv_dtype}" if self.kv_dtype else "") + (" sinks" if self.sinks else "")
        return text + ("" if self.causal else " not causal")


def _attention(target: Target, kind: str, heads: Heads) -> Call:
    element, cache = f"*{heads.dtype}", f"*{heads.kv_dtype or heads.dtype}"
    tiles = pick_tiles(
        group_size=heads.group,
        head_dim=heads.head_dim,
        page=heads.page,
        kind=_KINDS[kind.removesuffix(MERGE)],
        kv_bytes=1 if heads.kv_dtype else _BYTES[heads.dtype],
        hopper=target.name == "sm_90",
    )
    d_pad = max(16, triton.next_power_of_2(heads.head_dim))
    shape = {"G": heads.group, "D": heads.head_dim, "D_PAD": d_pad, "BLOCK_M": tiles.block_m}
    types = _all(element, "out_ptr") | _all("*fp32", "partial_ptr", "partial_lse_ptr")
    if kind.endswith(MERGE):
        types |= _all("*i32", "query_start_ptr", "merges_ptr")
        return Call(merge_splits_kernel, types, shape, merge_warps(tiles.block_m, d_pad))
    types |= _all(element, "q_ptr") | _all(cache, "k_ptr", "v_ptr")
    types |= _all("*i32", "table_ptr", "query_start_ptr", "seq_len_ptr", "items_ptr")
    types |= _all("*fp32" if heads.sinks else None, "sinks_ptr")
    types |= _all("*fp32" if heads.kv_dtype else None, "k_scale_ptr", "v_scale_ptr")
    constants = {
        **shape, "PAGE": heads.page, "TILE": tiles.tile, "WINDOW": heads.window, "SOFT_CAP": heads.soft_cap,
        "CONTIGUOUS": tiles.contiguous, "CAUSAL": heads.causal, "SINKS": heads.sinks,
        "QUANTISED": bool(heads.kv_dtype),
    }  # fmt: skip
    return Call(
        paged_attention_kernel, types, constants, tiles.num_warps, tiles.num_stages, tile_elements=tiles.tile * d_pad
    )


def attention(heads: Heads, *kinds: str) -> list[Variant]:
    """kinds: decode, prefill, long prefill; with " merge" behind it, the merge of their split key ranges."""
    variants = []
    for kind in kinds:
        targets = set(TARGETS)
        if ("prefill" in kind or heads.dtype == "fp32") and heads.head_dim > 128:
            targets.remove("gfx942")  # the tiles need more than the 64 KiB of LDS there, and those of prefill spill
        if kind.startswith("long prefill"):
            targets &= {"sm_90"}  # elsewhere its tiles are those of prefill
        if heads.kv_dtype == "fp8e4nv":
            targets &= {"sm_90"}  # no conversions in hardware before; gfx942 has another float8
        row = kind + (_EIGHT_BIT if heads.kv_dtype else _FP32 if heads.dtype == "fp32" else "")
        variants.append(Variant(row, str(heads), partial(_attention, kind=kind, heads=heads), frozenset(targets)))
    return variants


def _write(target: Target, heads: Heads) -> Call:
    d_pad, num_heads = triton.next_power_of_2(heads.head_dim), 8
    types = _all(f"*{heads.dtype}", "k_ptr", "v_ptr") | _all("*i64", "slots_ptr")
    types |= _all(f"*{heads.kv_dtype or heads.dtype}", "k_cache_ptr", "v_cache_ptr")
    types |= _all("*fp32" if heads.kv_dtype else None, "k_scale_ptr", "v_scale_ptr")
    constants = {
        "H": num_heads, "HEADS": min(num_heads, WRITE_TILE // d_pad), "D": heads.head_dim, "D_PAD": d_pad,
        "PAGE": heads.page, "QUANTISED": bool(heads.kv_dtype),
    }  # fmt: skip
    return Call(write_kv_kernel, types, constants)


def write(heads: Heads) -> Variant:
    targets = {"sm_90"} if heads.kv_dtype == "fp8e4nv" else TARGETS
    label = f"{heads.dtype} Hkv=8 D={heads.head_dim} page {heads.page}"
    label += f" cache {heads.kv_dtype}" if heads.kv_dtype else ""
    return Variant("write", label, partial(_write, heads=heads), frozenset(targets))


def _slots(target: Target, positions: bool) -> Call:
    types = _all("*i64", "groups_ptr", "rows_ptr", "slots_ptr", "positions_ptr")
    types |= _all("*i32", "query_start_ptr", "seq_len_ptr")
    if not positions:
        types["positions_ptr"] = None
    return Call(slots.slot_mapping_kernel, types, {"POSITIONS": positions, "BLOCK": slots.TOKENS})


def _states(target: Target, dtype: str, heads: int, head_dim: int) -> Call:
    types = _all(f"*{dtype}", "out_a_ptr", "out_b_ptr", "out_ptr")
    types |= _all("*fp32", "lse_a_ptr", "lse_b_ptr", "lse_ptr")
    d_pad = triton.next_power_of_2(head_dim)
    return Call(states.merge_states_kernel, types, {"H": heads, "D": head_dim, "D_PAD": d_pad, "ROWS": states.ROWS})


def _copy(target: Target) -> Call:
    types = _all("*i64", "caches_ptr", "copies_ptr", "chains_ptr")
    return Call(copies.copy_blocks_kernel, types, {"WORD": tl.int32, "ALIGNED": True, "PIECE": copies.PIECE_BYTES // 4})


def _gather(target: Target, dtype: str, kv_dtype: str, head_dim: int, page: int) -> Call:
    scaled = kv_dtype != dtype
    types = _all(f"*{kv_dtype}", "k_cache_ptr", "v_cache_ptr") | {"slots_ptr": "*i64"}
    types |= _all(f"*{dtype}", "k_ptr", "v_ptr")
    types |= _all("*fp32" if scaled else None, "k_scale_ptr", "v_scale_ptr")
    constants = {
        "D": head_dim, "D_PAD": triton.next_power_of_2(head_dim), "PAGE": page, "SCALED": scaled,
        "ROWS": copies.GATHERED_ROWS,
    }  # fmt: skip
    return Call(copies.gather_kv_kernel, types, constants)


def _add_norm(target: Target, dtype: str, size: int, add: bool) -> Call:
    types: Types = {
        "residual_ptr": "*fp32", "x_ptr": f"*{dtype}" if add else None, "weight_ptr": "*fp32", "out_ptr": f"*{dtype}",
    }  # fmt: skip
    padded = triton.next_power_of_2(size)
    constants = {"H": size, "H_PAD": padded, "ADD": add}
    return Call(elementwise.add_norm_kernel, types, constants, elementwise.norm_warps(padded))


def _heads(target: Target, q: int, kv: int, head_dim: int, page: int, norm: bool, rotate: bool, kv_dtype: str) -> Call:
    types: Types = {
        "rows_ptr": "*bf16",
        **_all(f"*{kv_dtype or 'bf16'}" if kv else None, "k_cache_ptr", "v_cache_ptr"),
        **_all("*fp32" if kv_dtype else None, "k_scale_ptr", "v_scale_ptr"),
        "slots_ptr": "*i64" if kv else None,
        "positions_ptr": "*i64" if rotate else None,
        "table_ptr": "*fp32" if rotate else None,
        "q_norm_ptr": "*fp32" if norm else None,
        "k_norm_ptr": "*fp32" if norm and kv else None,
    }
    constants = {
        "Q": q, "KV": kv, "D": head_dim, "HALF_PAD": triton.next_power_of_2(head_dim // 2), "PAGE": page, "NORM": norm,
        "ROTATE": rotate, "QUANTISED": bool(kv_dtype), "HEADS": elementwise.HEADS,
    }  # fmt: skip
    return Call(elementwise.heads_kernel, types, constants, elementwise.HEADS_WARPS)


def heads(text: str, q: int, kv: int = 0, *, norm: bool = False, rotate: bool = False, kv_dtype: str = "") -> Variant:
    """heads_kernel with heads of 128: norms, rotation, and if kv > 0 the cache write, into pages of 16."""
    return Variant(
        "heads",
        f"{text} bf16 Hq={q} D=128" + (f" Hkv={kv} page 16" if kv else "") + (f" cache {kv_dtype}" if kv_dtype else ""),
        partial(_heads, q=q, kv=kv, head_dim=128, page=16, norm=norm, rotate=rotate, kv_dtype=kv_dtype),
        frozenset({"sm_90"} if kv_dtype == "fp8e4nv" else TARGETS),
    )


def _gate(target: Target, dtype: str, size: int) -> Call:
    types = _all(f"*{dtype}", "gate_up_ptr", "out_ptr")
    return Call(elementwise.silu_and_mul_kernel, types, {"SIZE": size, "COLUMNS": elementwise.COLUMNS})


_BOTH = ("decode", "prefill")
_ALL = ("decode", "prefill", "long prefill")
_LLAMA = Heads("bf16", 128, 4, 16)

VARIANTS: tuple[Variant, ...] = (
    *attention(_LLAMA, *_ALL),
    *attention(replace(_LLAMA, page=64), *_ALL),
    *attention(replace(_LLAMA, page=128), *_ALL),
    *attention(replace(_LLAMA, dtype="fp16"), *_ALL),
    *attention(replace(_LLAMA, dtype="fp16", page=64), *_ALL),
    *attention(replace(_LLAMA, page=8), *_BOTH),
    *attention(replace(_LLAMA, page=48), *_BOTH),
    *attention(Heads("bf16", 64, 3, 16), *_ALL),
    *attention(Heads("bf16", 64, 8, 64, window=128, sinks=True), *_ALL),
    *attention(Heads("bf16", 128, 7, 64, window=4096), *_ALL),
    *attention(Heads("bf16", 128, 4, 64, soft_cap=True), *_BOTH),
    *attention(Heads("bf16", 128, 1, 64), *_BOTH),
    *attention(Heads("bf16", 128, 24, 64), *_BOTH),
    *attention(Heads("bf16", 128, 4, 64, causal=False), "prefill"),
    *attention(Heads("bf16", 80, 4, 64), *_ALL),
    *attention(Heads("bf16", 96, 4, 64), *_BOTH),
    *attention(Heads("bf16", 112, 4, 64), *_BOTH),
    *attention(Heads("bf16", 192, 4, 64), *_BOTH),
    *attention(Heads("bf16", 256, 2, 64, window=4096), *_BOTH),
    *(
        variant
        for kv_dtype in ("fp8e4nv", "i8")
        for page in (16, 64)
        for variant in attention(replace(_LLAMA, page=page, kv_dtype=kv_dtype), *_ALL)
    ),
    *attention(Heads("fp32", 64, 4, 16), "decode"),  # prefill has the same tiles
    *attention(Heads("fp32", 128, 4, 16), "decode"),
    *attention(Heads("fp32", 256, 4, 16), "decode"),
    *attention(_LLAMA, *(kind + MERGE for kind in _ALL)),
    *attention(Heads("bf16", 256, 2, 64), *(kind + MERGE for kind in _BOTH)),
    write(_LLAMA),
    write(replace(_LLAMA, head_dim=80)),
    write(replace(_LLAMA, kv_dtype="fp8e4nv")),
    write(replace(_LLAMA, kv_dtype="i8")),
    Variant("slots", "alone", partial(_slots, positions=False)),
    Variant("slots", "with positions", partial(_slots, positions=True)),
    Variant("states", "bf16 H=32 D=128", partial(_states, dtype="bf16", heads=32, head_dim=128)),
    Variant("copy", "of aligned blocks", _copy),
    Variant("gather", "bf16 D=128 page 16", partial(_gather, dtype="bf16", kv_dtype="bf16", head_dim=128, page=16)),
    Variant("gather", "i8 to bf16 D=128 page 16", partial(_gather, dtype="bf16", kv_dtype="i8", head_dim=128, page=16)),
    Variant("norm", "bf16 H=4096", partial(_add_norm, dtype="bf16", size=4096, add=False)),
    *(
        Variant("norm", f"with addition bf16 H={size}", partial(_add_norm, dtype="bf16", size=size, add=True))
        for size in (576, 4096, elementwise.MAX_NORM_SIZE)
    ),
    heads("rotation and write", 32, 8, rotate=True),
    heads("norm, rotation and write", 32, 8, norm=True, rotate=True),
    heads("rotation and write", 32, 8, rotate=True, kv_dtype="fp8e4nv"),
    heads("rotation and write", 32, 8, rotate=True, kv_dtype="i8"),
    heads("rotation", 40, rotate=True),
    heads("norm", 32, norm=True),
    Variant("gate", "bf16 I=14336", partial(_gate, dtype="bf16", size=14336)),
)
