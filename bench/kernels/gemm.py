"""The linear layers of a model measured as the worker computes them, beside torch's own product of plain weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from bench.kernels.cases import GemmCase
from bench.kernels.device import DTYPES, INT8, Bench, Call, CannotMeasure, relative_error
from bench.kernels.results import Baseline, Measured
from worker.layers.quantization import make_linear


def measure_gemm(case: GemmCase, backend_name: str, bench: Bench, limit_s: float) -> Measured:
    """Weights that take turns, as those of a model's layers do. Raises CannotMeasure."""
    quantization = "int8" if backend_name == INT8 else "none"
    if quantization == "int8" and (case.dtype != "bfloat16" or bench.device.type != "cpu"):
        raise CannotMeasure("8-bit layers are for bfloat16 models on a CPU")
    num_sets, cold = bench.num_sets(case.work.bytes)
    generator = torch.Generator(bench.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=bench.device).to(DTYPES[case.dtype])

    x = random(case.rows, case.inputs)
    weights = [random(case.outputs, case.inputs)]
    weights += [weights[0].clone() for _ in range(num_sets - 1)]
    with torch.inference_mode():
        layers = [make_linear(weight, quantization=quantization) for weight in weights]
        ours: list[Call] = [lambda layer=layer: layer(x) for layer in layers]  # type: ignore[misc]
        timing = bench.time(ours, cold=cold, limit_s=limit_s)
        error = relative_error(layers[0](x), functional.linear(x, weights[0]))
        if bench.device.type == "cuda":
            return Measured(case, backend_name, timing, relative_error=error)  # there the layer is torch's product
        plain: list[Call] = [lambda weight=weight: functional.linear(x, weight) for weight in weights]  # type: ignore[misc]
        baseline = bench.time(plain, cold=cold, limit_s=limit_s)
    return Measured(case, backend_name, timing, Baseline("torch linear", baseline), error)
