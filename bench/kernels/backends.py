"""The attention backend for a case, or the reason why there is none."""

from __future__ import annotations

from functools import cache

from bench.kernels.cases import AttentionCase
from bench.kernels.device import DTYPES, Bench, CannotMeasure
from kernels.backend import AttentionBackend
from kernels.registry import find
from kernels.selector import AttentionShape, why_not


def backend_for(name: str, case: AttentionCase, bench: Bench) -> AttentionBackend:
    """Raises CannotMeasure."""
    spec = find(name)
    shape = AttentionShape(
        bench.device.type, DTYPES[case.dtype], case.heads.head_dim, case.block_size, case.window, None
    )
    reason = why_not(spec, shape)
    if reason is None and case.kv_dtype != case.dtype:
        reason = f"no cache of {case.kv_dtype} for {case.dtype}"
    if reason is None and case.split_size is not None and name != "triton":
        reason = "splits no key ranges"
    if reason is not None:
        raise CannotMeasure(reason)
    if case.split_size is not None:
        from kernels.triton.backend import TritonBackend

        return TritonBackend(case.split_size)
    return load(name, bench.num_threads)


@cache
def load(name: str, num_threads: int | None) -> AttentionBackend:
    """One instance for all cases."""
    return find(name).load(num_threads)
