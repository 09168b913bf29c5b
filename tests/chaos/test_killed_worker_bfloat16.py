"""In bfloat16, with 8-bit layers and without: a token depends on its request alone, so a killed worker changes none."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from client import AsyncClient
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Recording, answers, record_all, run, wishes
from tests.integration.deployment import Deployment

STREAMS = 8
TOKENS = 120


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "bfloat16"), ("int8", "bfloat16 + int8")])
def test_streams_of_a_killed_worker_are_those_of_an_undisturbed_run(
    tmp_path: Path, tiny_folder: Path, quantization: str, dtype: str
) -> None:
    many = wishes(STREAMS, TOKENS)
    flags = ["--model", str(tiny_folder), "--workers", "2", "--dtype", "bfloat16", "--quantization", quantization]
    with Deployment(tmp_path, *flags, "--kv-memory", "16MiB") as server:
        assert {worker.dtype for worker in server.status().workers} == {dtype}
        golden = run(server.endpoints["client"], many)
        pids, killed = server.pids, asyncio.Event()

        def look(recording: Recording) -> None:
            if len(recording.tokens) >= TOKENS // 2 and not killed.is_set():
                os.kill(pids["worker-0"], signal.SIGKILL)
                killed.set()

        async def main() -> list[Recording]:
            async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
                return await record_all(client, many, look)

        recordings = asyncio.run(main())
        assert killed.is_set() and answers(recordings) == golden
        server.wait_in_service(WORKERS, not_pids=[pids["worker-0"]])
        assert sum(replica.recoveries for replica in server.status().replicas) == 1
