"""Which attention backends there are, and what each needs and supports. Imports none of them until one is loaded.

Being in this table proves only that an implementation can be found. That it was chosen, the selector's line says;
that it ran, its counters; how long it took, a profiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.backend import AttentionBackend
from kernels.quantise import LIMITS


@dataclass(frozen=True)
class BackendSpec:
    """One backend. Lower `rank` is tried first. No devices or dtypes, or None: there is no limit."""

    name: str
    rank: int
    module: str  # imported by load(); offers create(num_threads) -> AttentionBackend
    summary: str
    devices: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()  # of q, out and the KV cache, unless that is quantised
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    block_size_multiple: int = 1
    window: bool = True
    soft_cap: bool = True
    non_causal: bool = True
    sinks: bool = True
    sliced_cache: bool = True  # one cut out of a bigger pool, not contiguous
    kv_dtypes: frozenset[torch.dtype] = frozenset()  # quantised caches; that of q's own dtype is a matter of course
    lacks_kv_dtype: Callable[[torch.dtype], str | None] = field(default=lambda dtype: None)  # why not on this machine
    needs: tuple[str, ...] = ()  # modules that must be importable
    unavailable: Callable[[], str | None] = field(default=lambda: None)  # why not on this machine

    def missing(self) -> str | None:
        """Why this backend cannot run in this installation or on this machine, or None."""
        if not _importable(self.module):
            return "not part of this build"
        for module in self.needs:
            if not _importable(module):
                return f"{module} is not installed"
        return self.unavailable()

    def load(self, num_threads: int | None) -> AttentionBackend:
        """Import and make the backend; num_threads is how many cores it may use."""
        backend: AttentionBackend = importlib.import_module(self.module).create(num_threads)
        return backend


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


def _no_float8(dtype: torch.dtype) -> str | None:
    """NVIDIA GPUs convert float8_e4m3fn from compute capability 8.9 on; Triton compiles it for no other."""
    if dtype is not torch.float8_e4m3fn or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 9) else f"needs compute capability 8.9, not {capability[0]}.{capability[1]}"


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs its kernels on CPU tensors, slowly: for tests, and never chosen unless asked for."""

_HALVES_AND_FLOAT = frozenset({torch.bfloat16, torch.float16, torch.float32})

BACKENDS: tuple[BackendSpec, ...] = (
    BackendSpec(
        name="triton",
        rank=3 if _INTERPRETED else 0,
        module="kernels.triton.backend",
        summary="Triton: one kernel for prefill and decode",
        devices=frozenset({"cpu"} if _INTERPRETED else {"cuda"}),
        dtypes=_HALVES_AND_FLOAT,
        max_head_dim=256,
        kv_dtypes=frozenset(LIMITS),
        lacks_kv_dtype=_no_float8,
        needs=("triton",),
        unavailable=(lambda: None) if _INTERPRETED else _no_cuda,
    ),
    BackendSpec(
        name="cpu",
        rank=1,
        module="kernels.cpu.backend",
        summary="Numba with explicit vectors: one kernel for prefill and decode",
        devices=frozenset({"cpu"}),
        dtypes=_HALVES_AND_FLOAT,
        head_dim_multiple=16,
        max_head_dim=512,
        non_causal=False,
        sinks=False,
        sliced_cache=False,
        needs=("numba",),
    ),
    BackendSpec(
        name="torch",
        rank=2,
        module="kernels.torch_backend",
        summary="plain PyTorch, one sequence at a time",
        kv_dtypes=frozenset(LIMITS),
    ),
)


def find(name: str) -> BackendSpec:
    """The backend of that name. Raises KeyError, which lists those there are."""
    for spec in BACKENDS:
        if spec.name == name:
            return spec
    raise KeyError(f"no attention backend {name!r}; there are {', '.join(spec.name for spec in BACKENDS)}")
