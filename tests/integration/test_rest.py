"""Real workers rest while another of them computes a long prompt, and say so, and no token changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from client import AsyncClient, SamplingParams
from tests.integration.deployment import Deployment
from tests.tiny_model import tiny_model

LONG = [(7 * place) % 250 for place in range(1500)]
FLAGS = (
    *("--workers", "2", "--kv-memory", "16MiB", "--device", "cpu", "--dtype", "float32"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--max-step-stretch", "9"),
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def answer(
    client: AsyncClient, prompt: list[int], max_tokens: int, salt: str = "", started: asyncio.Event | None = None
) -> list[int]:
    """The output tokens; `started` is set when there are fifty."""
    tokens: list[int] = []
    async for chunk in client.generate(prompt, greedy(max_tokens), cache_salt=salt, detokenize=False):
        tokens += chunk.token_ids
        if started is not None and len(tokens) >= 50:
            started.set()
    return tokens


async def long_prompt_beside_streams(endpoint: str) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Tokens of a long prompt that comes when four streams decode, and of the first two of these; the same of each
    alone; seconds that each replica rested."""
    streams = [[number] * 9 for number in range(4)]
    async with AsyncClient(endpoint) as client:
        started = [asyncio.Event() for _ in streams]
        tasks = [
            asyncio.create_task(answer(client, prompt, 500, started=event))
            for prompt, event in zip(streams, started, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        together = [await answer(client, LONG, 60), *(await asyncio.gather(*tasks))[:2]]
        rested = [replica.rested_s for replica in (await client.metrics()).replicas]
        alone = [await answer(client, LONG, 60, "alone")]
        alone += [await answer(client, prompt, 500, "alone") for prompt in streams[:2]]
        return together, alone, rested


def test_workers_rest_for_a_long_prompt_and_no_token_changes(tmp_path: Path) -> None:
    with Deployment(tmp_path, "--model", str(tiny_model()), *FLAGS) as deployment:
        together, alone, rested = asyncio.run(long_prompt_beside_streams(deployment.endpoints["client"]))
    assert together == alone
    assert max(rested) > 0.01
