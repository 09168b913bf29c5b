"""A worker that stands still is given up after the heartbeat limit; one that only computes for long is not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client import AsyncClient
from protocol.messages import SamplingParams
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Recording, answers, record_all, run, wishes
from tests.integration.deployment import Deployment
from tests.tiny_model import write_tiny_model

HEARTBEAT_LIMIT_S = 1.0
SETTINGS: dict[str, object] = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": HEARTBEAT_LIMIT_S}
TOKENS = 400


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Deployment]:
    """Two workers with a small heartbeat limit."""
    flags = ["--model", str(tiny_folder), "--workers", "2", "--dtype", "float32", "--kv-memory", "32MiB"]
    with Deployment(tmp_path_factory.mktemp("impatient"), *flags, settings=SETTINGS) as deployment:
        yield deployment


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still in here."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it was killed: as it should be


def freeze_midway(server: Deployment, pid: int) -> list[Recording]:
    """Sixteen streams, and the process stopped when the first of them is halfway; until all have ended."""

    async def main() -> list[Recording]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            halfway = asyncio.Event()

            def look(recording: Recording) -> None:
                if len(recording.tokens) >= TOKENS // 2:
                    halfway.set()

            streams = asyncio.create_task(record_all(client, wishes(16, TOKENS), look))
            await halfway.wait()
            with stopped(pid):
                return await streams

    return asyncio.run(main())


def test_requests_of_a_frozen_worker_move_and_it_is_replaced(impatient: Deployment) -> None:
    golden = run(impatient.endpoints["client"], wishes(16, TOKENS))
    pid = impatient.pids["worker-0"]
    recordings = freeze_midway(impatient, pid)
    assert answers(recordings) == golden
    assert max(recording.longest_silence_s for recording in recordings) < HEARTBEAT_LIMIT_S + 3
    assert "worker-0 is killed for the scheduler: no sign of life for 1." in impatient.text
    impatient.wait_in_service(WORKERS, not_pids=[pid])
    impatient.wait_idle()


def test_worker_that_thaws_after_its_requests_moved_can_change_nothing(impatient: Deployment) -> None:
    """The supervisor stands still too, so nobody kills the worker: it wakes up late and reports its last step."""
    assert impatient.process is not None
    golden = run(impatient.endpoints["client"], wishes(16, TOKENS))
    pid = impatient.pids["worker-0"]
    fenced = impatient.status().replicas[0].fenced_messages
    with stopped(impatient.process.pid):
        recordings = freeze_midway(impatient, pid)  # and thawed at its end
        assert answers(recordings) == golden
        assert impatient.status().workers[0].state == "dead"
        impatient.wait_until(
            lambda: impatient.status().replicas[0].fenced_messages > fenced, 10, "late results are fenced"
        )
        assert run(impatient.endpoints["client"], wishes(16, TOKENS)) == golden
    impatient.wait_in_service(WORKERS, not_pids=[pid])
    impatient.wait_idle()


def test_step_longer_than_the_heartbeat_limit_is_not_taken_for_death(tmp_path: Path) -> None:
    """One prefill longer than the limit: the heartbeat must not depend on the step."""
    limit_s, prompt_len = 0.4, 1900
    shape = {"hidden_size": 512, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16}
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=5, head_dim=32, **shape)
    (tmp_path / "folder").mkdir()
    settings: dict[str, object] = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": limit_s}
    flags = ("--model", str(model), "--workers", "1", "--dtype", "float32", "--kv-memory", "128MiB")
    flags += ("--max-num-batched-tokens", "2048", "--threads-per-worker", "1")
    with Deployment(tmp_path / "folder", *flags, settings=settings) as server:
        pids = server.pids
        began = time.monotonic()
        done = server.client.complete([7] * prompt_len, SamplingParams(max_tokens=1), detokenize=False)
        assert time.monotonic() - began > limit_s, "the step was too short to show anything"
        assert done.usage.completion_tokens == 1
        assert server.pids == pids
        assert server.recoveries() == 0
