"""One deployment with a gateway for all tests of this folder, found whole and idle by each, and left so."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.integration.deployment import Deployment
from tests.tiny_model import write_tiny_model

WORKERS = ("worker-0", "worker-1")
MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two workers of a tiny model in float32, so that an answer depends on nothing but its request."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)
    flags = ["--model", str(model), "--workers", "2", "--dtype", "float32", "--kv-memory", "32MiB", "--port", "0"]
    flags += ["--max-num-seqs", str(MAX_NUM_SEQS)]
    with Deployment(tmp_path_factory.mktemp("http"), *flags) as deployment:
        yield deployment


@pytest.fixture
def server(two_workers: Deployment) -> Iterator[Deployment]:
    """The shared deployment, whole and idle before the test and found so again after it."""
    with two_workers.whole_and_idle(WORKERS):
        yield two_workers


@pytest.fixture
def url(server: Deployment) -> str:
    """Where the gateway of the shared deployment listens."""
    return server.endpoints["http"]


@pytest.fixture
def openai(url: str) -> Iterator[OpenAI]:
    """The official client, which must report every error instead of trying again."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client
