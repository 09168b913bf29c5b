"""What stands between the matrix products of a layer measured: norm, gate, rotation with the cache write in one pass.

Beside it, the same from PyTorch's operations, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernels.cases import ElementwiseCase
from bench.kernels.device import DTYPES, Bench, Call, CannotMeasure, relative_error
from bench.kernels.results import Baseline, Measured
from kernels.torch_backend import TorchBackend
from worker.layers.ops import Ops, TorchOps, make_ops

EPS = 1e-5
BASELINE = "torch operations"
BLOCK_SIZE = 64

Compute = Callable[[], Tensor]


def measure_elementwise(case: ElementwiseCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Raises CannotMeasure."""
    if case.op == "rotate_and_write_kv" and bench.device.type != "cuda":
        raise CannotMeasure("one pass for rotation and cache write is there on a GPU only")
    num_sets, cold = bench.num_sets(case.work.bytes)
    with torch.inference_mode():
        ours, theirs = [], []
        for seed in range(num_sets):
            mine, torchs = calls_of(case, bench.device, seed)
            ours.append(mine)
            theirs.append(torchs)
        error = relative_error(ours[0](), theirs[0]())
        timing = bench.time(as_calls(ours), cold=cold, limit_s=limit_s)
        baseline = bench.time(as_calls(theirs), cold=cold, limit_s=limit_s)
    return Measured(case, backend_name, timing, Baseline(BASELINE, baseline), error)


def as_calls(computations: list[Compute]) -> list[Call]:
    return list(computations)


def calls_of(case: ElementwiseCase, device: torch.device, seed: int) -> tuple[Compute, Compute]:
    """Ours and torch's, on inputs of the same values but of their own, since some are changed in place."""
    dtype = DTYPES[case.dtype]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)

    model, rows = case.model, case.rows
    if case.op == "add_norm":
        x, weight = random(rows, model.hidden).to(dtype), random(model.hidden)
        ops: tuple[Ops, Ops] = (ops_for(dtype, device), TorchOps(dtype))
        first, second = (add_norm_call(each, random(rows, model.hidden), x, weight) for each in ops)
        return first, second
    if case.op == "silu_and_mul":
        gate_up = random(rows, 2 * model.intermediate).to(dtype)
        mine, torchs = ops_for(dtype, device), TorchOps(dtype)
        return lambda: mine.silu_and_mul(gate_up), lambda: torchs.silu_and_mul(gate_up)
    return _rotations(case, device, random)


def ops_for(dtype: torch.dtype, device: torch.device) -> Ops:
    """The compiled form of a device."""
    if device.type == "cuda":
        from kernels.triton.elementwise import TritonOps

        return TritonOps(dtype)
    return make_ops(dtype, device)


def add_norm_call(ops: Ops, residual: Tensor, x: Tensor, weight: Tensor) -> Compute:
    return lambda: ops.add_norm(residual, x, weight, EPS)


def _rotations(case: ElementwiseCase, device: torch.device, random: Callable[..., Tensor]) -> tuple[Compute, Compute]:
    """Q rotated in place, K rotated on its way into the cache, V copied; each gives the Q part of its rows."""
    from kernels.triton.elementwise import TritonOps

    heads, dtype, rows = case.model.heads, DTYPES[case.dtype], case.rows
    num_heads, width = heads.num_q + heads.num_kv, heads.num_q + 2 * heads.num_kv
    table = random(rows + 1, heads.head_dim)
    table = table / table.norm(dim=1, keepdim=True)  # repeated rotation must not let values grow
    positions = torch.randperm(rows, device=device)
    pool = (-(-rows // BLOCK_SIZE) + 1, heads.num_kv, BLOCK_SIZE, heads.head_dim)
    slots = positions + BLOCK_SIZE
    triton, torchs, backend = TritonOps(dtype), TorchOps(dtype), TorchBackend()

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
        return random(rows, width * heads.head_dim).to(dtype), k_cache, v_cache

    fused, k_fused, v_fused = inputs()
    plain, k_plain, v_plain = inputs()

    def one_pass() -> Tensor:
        triton.rotate_and_write_kv(fused, heads.num_q, positions, table, k_fused, v_fused, slots)
        return fused[:, : heads.num_q * heads.head_dim]

    def several() -> Tensor:
        torchs.rotate(plain, num_heads, positions, table)
        split = plain.view(rows, width, heads.head_dim)
        backend.write_kv(split[:, heads.num_q : num_heads], split[:, num_heads:], k_plain, v_plain, slots)
        return plain[:, : heads.num_q * heads.head_dim]

    return one_pass, several
