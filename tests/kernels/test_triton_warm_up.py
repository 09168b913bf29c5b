"""After warm-up no step waits for a compiler: what serving asks for, warm-up has asked for. Nothing is compiled here.

Triton compiles a kernel anew for other constants, dtypes, and, unless told not to, for integers and addresses that are
or are not multiples of 16. Its own function for that is asked what it would have told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import triton_here
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS

triton_here()  # decides how the kernels are imported

from kernels.triton import backend as module  # noqa: E402

SPLIT = 256
KERNELS = ("paged_attention_kernel", "merge_splits_kernel", "write_kv_kernel")


class Recorder:
    """In the place of a kernel: notes which compiled form each launch would take, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        options = {k: v for k, v in getattr(kernel, "kwargs", {}).items() if k.startswith("do_not_specialize")}
        function: Any = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **options)
        compiler = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(function.signature, function.params, compiler)
        self.forms: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            _, specialization, options = self._bind(*arguments, **constants)
            self.forms.add(f"{specialization} {options}")

        return launch


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    made = {name: Recorder(getattr(module, name)) for name in KERNELS}
    for name, recorder in made.items():
        monkeypatch.setattr(module, name, recorder)
    return made


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "features"),
    [
        ((32, 8), 128, 16, torch.bfloat16, {}),
        ((32, 8), 128, 64, torch.bfloat16, {"kv_dtype": torch.float8_e4m3fn}),
        ((9, 3), 64, 16, torch.float16, {"window": 100}),
        ((8, 8), 80, 48, torch.bfloat16, {"soft_cap": 30.0, "causal": False}),
        ((64, 8), 64, 128, torch.bfloat16, {"sinks": True, "window": 128, "kv_dtype": torch.int8}),
        ((14, 2), 256, 32, torch.float32, {}),
    ],
    ids=str,
)
def test_serving_needs_no_form_that_warm_up_has_not_seen(
    recorders: dict[str, Recorder], heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype,
    features: dict[str, Any],
) -> None:  # fmt: skip
    backend = module.TritonBackend(SPLIT)
    backend.warms_splits = True
    backend.warm_up(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, dtype=dtype, **features
    )
    warm = {name: set(recorder.forms) for name, recorder in recorders.items()}
    assert all(warm.values())

    device = torch.device("cpu" if module.INTERPRETED else "cuda")
    kv_dtype = features.pop("kv_dtype", None)
    if features.pop("sinks", False):
        features["sinks"] = torch.zeros(heads[0], device=device)
    scale = torch.ones(heads[1], device=device) if kv_dtype in LIMITS else None
    cache = torch.zeros((3, heads[1], block_size, head_dim), dtype=kv_dtype or dtype, device=device)
    steps = [
        [(1, 1)], [(1, 16)], [(1, 700)] * 3, [(5, 5), (1, 0), (0, 0)], [(1, 300), (40, 700), (800, 1000), (2, 2)],
        [(17, 17)] * 17,
    ]  # fmt: skip
    for step in steps:
        query_lens, seq_lens = [q for q, _ in step], [n for _, n in step]
        width = -(-max(seq_lens) // block_size) + len(step)
        metadata = AttentionMetadata.build(query_lens, seq_lens, [[1] * width] * len(step), block_size, device)
        metadata = dataclasses.replace(
            metadata,
            query_start_loc=unaligned(metadata.query_start_loc),
            seq_lens=unaligned(metadata.seq_lens),
            block_table=unaligned(metadata.block_table),
            slot_mapping=unaligned(metadata.slot_mapping),
        )
        qkv = torch.zeros((sum(query_lens), heads[0] + 2 * heads[1], head_dim), dtype=dtype, device=device)
        q, k, v = qkv.split((heads[0], heads[1], heads[1]), dim=1)
        backend.write_kv(k, v, cache, cache, metadata.slot_mapping, scale, scale)
        backend.paged_attention(
            q, cache, cache, metadata, scale=0.1, k_scale=scale, v_scale=scale, out=torch.empty_like(q), **features
        )
    for name, recorder in recorders.items():
        assert recorder.forms == warm[name], f"{name} would be compiled while serving"
