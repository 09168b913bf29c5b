"""Deployments that several tests share: each takes seconds to start, and what leaves one whole may use it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment import Deployment
from tests.tiny_model import write_tiny_model

WORKERS = ("worker-0", "worker-1")
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes long sequences."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Deployment]:
    """Two workers in float32, so that an answer depends on nothing but its request."""
    flags = ["--model", str(tiny_folder), "--workers", "2", "--dtype", "float32", "--kv-memory", "32MiB"]
    flags += ["--max-num-seqs", str(MAX_NUM_SEQS)]
    with Deployment(tmp_path_factory.mktemp("two"), *flags) as deployment:
        yield deployment


@pytest.fixture
def server(two_workers: Deployment) -> Iterator[Deployment]:
    """The shared deployment, whole and idle before the test and found so again after it."""
    with two_workers.whole_and_idle(WORKERS):
        yield two_workers
