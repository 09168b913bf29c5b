from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.backend import AttentionBackend
from kernels.registry import BACKENDS, BackendSpec, find
from kernels.selector import AttentionShape, why_not


def triton_here() -> BackendSpec:
    """The Triton backend as this machine runs it. Decides it for the process: call it before its kernels are imported.

    With a GPU they are compiled. Without one they are interpreted, on CPU tensors, as they are if they are imported
    under this variable.
    """
    if torch.cuda.is_available():
        return find("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import kernels.triton.backend

        assert kernels.triton.backend.INTERPRETED
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    return dataclasses.replace(find("triton"), devices=frozenset({"cpu"}), unavailable=lambda: None)


SHAPE = AttentionShape("cpu", torch.float32, head_dim=64, block_size=16)
RUNNABLE = [spec for spec in BACKENDS if spec.name != "triton" and why_not(spec, SHAPE) is None]
RUNNABLE.append(triton_here())


def marks_of(spec: BackendSpec) -> list[pytest.MarkDecorator]:
    """A test of a backend that computes on a GPU is one of those that need one."""
    return [pytest.mark.gpu] if spec.name == "triton" and torch.cuda.is_available() else []


def backends_for(shape: AttentionShape) -> list[BackendSpec]:
    """Those of this machine that say they can run this shape, whatever its device: each on its own. The registry's word
    is taken, so that a test checks it."""
    gpu = dataclasses.replace(shape, device="cuda")
    return [spec for spec in RUNNABLE if why_not(spec, gpu if marks_of(spec) else shape) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where Triton's kernels are compiled, their tests are among those that `-m gpu` selects."""
    for item in items:
        here = item.path.parent == Path(__file__).parent and item.path.stem.startswith(("test_triton", "test_decode"))
        if here and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors here are tiny: threads that wait for each other only slow the tests down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=[pytest.param(spec, id=spec.name, marks=marks_of(spec)) for spec in RUNNABLE])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each backend that runs on this machine, with one thread."""
    return request.param.load(num_threads=1)
