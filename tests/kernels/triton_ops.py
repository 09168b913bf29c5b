"""The smaller Triton kernels, imported so that they are interpreted on CPU tensors; compiled where there is a GPU.

Tests import the modules from here: which of the two a kernel is gets decided when its module is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_before = os.environ.get("TRITON_INTERPRET")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
try:
    from kernels.triton import backend, copies, elementwise, slots, states, variants
finally:
    if _before is None:
        os.environ.pop("TRITON_INTERPRET", None)

FORMS = ["kernel", "torch"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

__all__ = [
    "DEVICE",
    "DTYPES",
    "FORMS",
    "assert_rounded",
    "backend",
    "computed_by",
    "copies",
    "elementwise",
    "name_of",
    "slots",
    "states",
    "variants",
]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_rounded(actual: Tensor, exact: Tensor, sums: float = 4e-6) -> None:
    """actual is the float64 result, rounded to actual's dtype once; `sums`: error of float32 arithmetic before that."""
    half_ulp = torch.finfo(actual.dtype).eps / 2
    torch.testing.assert_close(
        actual.cpu().double(), exact.cpu().double(), atol=sums, rtol=half_ulp * 1.05 + sums, equal_nan=True
    )


@contextmanager
def computed_by(form: str, module: ModuleType) -> Iterator[None]:
    """ "kernel": the module's kernels run, or this fails. "torch": its wrappers go without them."""
    if form == "torch":
        with patch.object(module, "can_run", lambda kernel, tensor: False):
            yield
        return
    ran = []

    def can_run(kernel: object, tensor: Tensor) -> bool:
        assert original(kernel, tensor), f"{kernel} was imported to be compiled, and cannot run on {tensor.device}"
        ran.append(kernel)
        return True

    original = module.can_run
    with patch.object(module, "can_run", can_run):
        yield
    assert ran, "no kernel ran"
