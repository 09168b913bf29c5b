from __future__ import annotations

import pytest
import torch

from kernels.backend import AttentionBackend
from kernels.registry import BACKENDS
from kernels.selector import AttentionShape, why_not

RUNNABLE = [
    spec for spec in BACKENDS if why_not(spec, AttentionShape("cpu", torch.float32, head_dim=64, block_size=16)) is None
]


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda spec: spec.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each backend that runs on this machine, with one thread."""
    return request.param.load(num_threads=1)
