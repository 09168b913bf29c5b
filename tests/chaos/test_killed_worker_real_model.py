"""The default model and dtype, sixteen conversations, one of two workers killed with -9: token by token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from client import AsyncClient
from protocol.config import EngineConfig
from protocol.messages import SamplingParams
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Recording, Wish, answers, record_all, run
from tests.integration.deployment import Deployment

PLACES = (
    *("France", "Japan", "Peru", "Kenya", "Spain", "Norway", "Egypt", "India"),
    *("Chile", "Ghana", "Cuba", "Iran", "Laos", "Mali", "Oman", "Togo"),
)
TOKENS = 16


def test_sixteen_conversations_outlive_a_killed_worker(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--kv-memory", "256MiB", "--max-model-len", "512")
    with Deployment(tmp_path, *flags) as server:
        many = asyncio.run(_conversations(server.endpoints["client"]))
        golden = run(server.endpoints["client"], many)
        pids = server.pids
        halfway = asyncio.Event()

        def look(recording: Recording) -> None:
            if len(recording.tokens) >= TOKENS // 2 and not halfway.is_set():
                os.kill(pids["worker-1"], signal.SIGKILL)
                halfway.set()

        async def main() -> list[Recording]:
            async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
                return await record_all(client, many, look)

        began = time.monotonic()
        recordings = asyncio.run(main())
        assert halfway.is_set()
        assert answers(recordings) == golden
        # the death itself was noticed, not the silence after it
        assert max(recording.longest_silence_s for recording in recordings) < EngineConfig().heartbeat_timeout_s
        server.wait_in_service(WORKERS, not_pids=[pids["worker-1"]])
        assert time.monotonic() - began < 30
        server.wait_idle()


async def _conversations(endpoint: str) -> list[Wish]:
    """Questions in the model's chat format; every other answer is sampled."""
    async with AsyncClient(endpoint) as client:
        tokenizer = await client.tokenizer()
    return [
        Wish(
            tuple(tokenizer.encode_chat([{"role": "user", "content": f"What is the capital of {place}?"}])),
            SamplingParams(max_tokens=TOKENS, temperature=i % 2, top_p=0.9, seed=i, ignore_eos=True),
        )
        for i, place in enumerate(PLACES)
    ]
