"""Which attention backend a worker gets, and why not each other. Loads only the one it chooses.

With `auto`, the first by rank that supports the shape. A backend asked for by name is taken or refused, never
replaced: a benchmark that names a backend must not measure another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import AttentionBackend
from kernels.registry import BACKENDS, BackendSpec, find

AUTO = "auto"


class NoBackend(ValueError):
    """No backend, or not the one asked for, can run this shape. The message says why for each."""


@dataclass(frozen=True)
class AttentionShape:
    """What decides the choice: the device, and how the layers and the cache are shaped."""

    device: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of q, out and, unless kv_dtype says otherwise, the cache
    head_dim: int
    block_size: int  # the kernel's, in slots
    window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    sinks: bool = False
    kv_dtype: torch.dtype | None = None  # of a quantised cache
    sliced_cache: bool = False  # cut out of a bigger pool

    def __str__(self) -> str:
        text = f"{self.device}, {_name(self.dtype)}, head_dim {self.head_dim}, block {self.block_size}"
        if self.window is not None:
            text += f", window {self.window}"
        if self.soft_cap is not None:
            text += f", soft cap {self.soft_cap:g}"
        if not self.causal:
            text += ", not causal"
        if self.sinks:
            text += ", sinks"
        if self.kv_dtype is not None:
            text += f", cache {_name(self.kv_dtype)}"
        if self.sliced_cache:
            text += ", sliced cache"
        return text


@dataclass(frozen=True)
class Selection:
    """A backend that is ready to be warmed up, the line for the log, and for each other why it is not it."""

    backend: AttentionBackend
    reason: str
    rejected: dict[str, str]


def why_not(spec: BackendSpec, shape: AttentionShape) -> str | None:
    """The first reason for which this backend cannot run this shape here, or None if it can."""
    if spec.devices and shape.device not in spec.devices:
        return f"runs on {', '.join(sorted(spec.devices))}, not on {shape.device}"
    if spec.dtypes and shape.dtype not in spec.dtypes:
        return f"has no {_name(shape.dtype)}"
    if shape.head_dim % spec.head_dim_multiple:
        return f"needs a head_dim that is a multiple of {spec.head_dim_multiple}, not {shape.head_dim}"
    if spec.max_head_dim is not None and shape.head_dim > spec.max_head_dim:
        return f"head_dim is at most {spec.max_head_dim}, not {shape.head_dim}"
    if shape.block_size % spec.block_size_multiple:
        return f"needs a block size that is a multiple of {spec.block_size_multiple}, not {shape.block_size}"
    if shape.window is not None and not spec.window:
        return "has no sliding window"
    if shape.soft_cap is not None and not spec.soft_cap:
        return "has no soft cap"
    if not shape.causal and not spec.non_causal:
        return "is causal only"
    if shape.sinks and not spec.sinks:
        return "has no attention sinks"
    if shape.sliced_cache and not spec.sliced_cache:
        return "needs a contiguous cache"
    if shape.kv_dtype is not None and shape.kv_dtype != shape.dtype:
        if shape.kv_dtype not in spec.kv_dtypes:
            return f"has no {_name(shape.kv_dtype)} cache"
        lacking = spec.lacks_kv_dtype(shape.kv_dtype)
        if lacking is not None:
            return f"{_name(shape.kv_dtype)} cache {lacking}"
    return spec.missing()


def rank_backends(requested: str, shape: AttentionShape) -> tuple[BackendSpec, dict[str, str]]:
    """The backend for this shape and why not each other, without loading any. Raises NoBackend."""
    if requested != AUTO:
        try:
            chosen = find(requested)
        except KeyError as error:
            raise NoBackend(f"{error.args[0]}, or {AUTO}") from None
        reason = why_not(chosen, shape)
        if reason is not None:
            raise NoBackend(f"attention backend {requested} cannot run ({shape}): {reason}")
        others = (spec for spec in BACKENDS if spec is not chosen)
        return chosen, {spec.name: why_not(spec, shape) or f"{requested} was asked for" for spec in others}
    rejected: dict[str, str] = {}
    best: BackendSpec | None = None
    for spec in sorted(BACKENDS, key=lambda spec: spec.rank):
        reason = why_not(spec, shape)
        if reason is not None:
            rejected[spec.name] = reason
        elif best is None:
            best = spec
        else:
            rejected[spec.name] = f"would do, but {best.name} comes first"
    if best is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        raise NoBackend(f"no attention backend can run ({shape}): {reasons}")
    return best, rejected


def explain(requested: str, shape: AttentionShape, chosen: BackendSpec, rejected: dict[str, str]) -> str:
    """The one line of the log: what was chosen, for what, and why not each other."""
    others = "; ".join(f"not {name}: {reason}" for name, reason in rejected.items())
    how = "chosen automatically" if requested == AUTO else "asked for"
    return f"attention backend {chosen.name} ({how}) for {shape}; {others}"


def select_backend(
    requested: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    sinks: bool = False,
    kv_dtype: torch.dtype | None = None,
    num_threads: int | None = None,
) -> Selection:
    """Choose, load and explain. `requested` is `auto` or a name; num_threads is the worker's share of the cores.

    Raises NoBackend, which names the reason, if the one asked for (or, with auto, every one) cannot run this shape.
    """
    shape = AttentionShape(
        torch.device(device).type, dtype, head_dim, block_size, window, soft_cap, causal, sinks, kv_dtype
    )
    chosen, rejected = rank_backends(requested, shape)
    backend = chosen.load(num_threads)
    return Selection(backend, explain(requested, shape, chosen, rejected), rejected)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
