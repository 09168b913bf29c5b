"""The attention backend for a case, or the reason why there is none."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bench.kernels.cases import AttentionCase, TileChoice, WriteKVCase
from bench.kernels.device import DTYPES, Bench, CannotMeasure
from kernels.backend import AttentionBackend
from kernels.registry import find
from kernels.selector import AttentionShape, why_not

SCALES = {"fp8_e4m3": 1 / 64, "int8": 1 / 24}
"""At which standard normal values use the range of a quantised cache, and hardly one is clamped."""


def backend_for(
    name: str,
    case: AttentionCase | WriteKVCase,
    bench: Bench,
    window: int | None = None,
    split_size: int | None = None,
    tiles: TileChoice | None = None,
) -> AttentionBackend:
    """Raises CannotMeasure."""
    shape = AttentionShape(
        bench.device.type, DTYPES[case.dtype], case.heads.head_dim, case.block_size, window,
        kv_dtype=DTYPES[case.kv_dtype] if case.kv_dtype != case.dtype else None,
    )  # fmt: skip
    reason = why_not(find(name), shape)
    if reason is None and name != "triton" and (split_size is not None or tiles is not None):
        reason = "splits no key ranges and has no tiles to choose"
    if reason is not None:
        raise CannotMeasure(reason)
    if tiles is not None:
        from bench.kernels.tiles import ChosenTiles

        return ChosenTiles(tiles)
    if split_size is not None:
        from kernels.triton.backend import TritonBackend

        return TritonBackend(split_size)
    return load(name, bench.num_threads)


@cache
def load(name: str, num_threads: int | None) -> AttentionBackend:
    """One instance for all cases."""
    return find(name).load(num_threads)


def scale_for(kv_dtype: str, num_kv_heads: int, device: torch.device) -> Tensor | None:
    """float32 [num_kv_heads] for a quantised cache."""
    return torch.full((num_kv_heads,), SCALES[kv_dtype], device=device) if kv_dtype in SCALES else None
