from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.backend import AttentionBackend
from kernels.registry import BACKENDS
from kernels.selector import AttentionShape, why_not

RUNNABLE = [
    spec for spec in BACKENDS if why_not(spec, AttentionShape("cpu", torch.float32, head_dim=64, block_size=16)) is None
]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors here are tiny: threads that wait for each other only slow the tests down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda spec: spec.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each backend that runs on this machine, with one thread."""
    return request.param.load(num_threads=1)
