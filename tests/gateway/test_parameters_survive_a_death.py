"""A worker is killed under streams with penalties, a grammar and log-probabilities: they end as if nothing had been."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from tests.gateway.conftest import WORKERS
from tests.integration.deployment import Deployment

TOKENS = 160
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"extra_body": {"repetition_penalty": 1.2, "ignore_eos": True}, "logprobs": 3},
    {"extra_body": {"guided_regex": "([a-z]{2,4}[0-9];){200}"}, "logprobs": 0},
    {"extra_body": {"guided_regex": "([A-Z]{3},){200}"}, "frequency_penalty": 0.3, "logit_bias": {"65": 2}},
]


class Stream:
    """What came of one request so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason: str | None = None


async def read(client: AsyncOpenAI, number: int, stream: Stream, on_tokens: asyncio.Event, at: int) -> Stream:
    options = {**KINDS[number % len(KINDS)]}
    extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
    prompt = [(11 * number + i) % 90 + 33 for i in range(40)]
    chunks = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=TOKENS, seed=number, stream=True, extra_body=extra, **options
    )
    async for chunk in chunks:
        choice: Any = chunk.choices[0]
        stream.tokens += choice.token_ids
        stream.logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
        stream.reason = choice.finish_reason or stream.reason
        if len(stream.tokens) >= at:
            on_tokens.set()
    return stream


async def run(url: str, server: Deployment | None) -> list[Stream]:
    """All at once; with a server, worker-0 is killed when each has got somewhere."""
    streams, reached = [Stream() for _ in range(8)], [asyncio.Event() for _ in range(8)]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        tasks = [
            asyncio.create_task(read(client, i, stream, event, 10 + 8 * i))
            for i, (stream, event) in enumerate(zip(streams, reached, strict=True))
        ]
        if server is not None:
            for event in reached:
                await event.wait()
            assert any(stream.reason is None for stream in streams)
            server.kill("worker-0")
        return await asyncio.gather(*tasks)


def test_tokens_and_logprobs_are_those_of_an_unkilled_run(url: str, server: Deployment) -> None:
    golden = asyncio.run(run(url, None))
    recoveries = server.recoveries()
    pid = server.pids["worker-0"]
    killed = asyncio.run(run(url, server))
    server.wait_in_service(WORKERS, not_pids=[pid])
    assert server.recoveries() > recoveries
    for right, found in zip(golden, killed, strict=True):
        assert len(right.tokens) == TOKENS
        assert (found.tokens, found.reason) == (right.tokens, right.reason)
        assert len(found.logprobs) == len(right.logprobs) in (0, TOKENS)
        np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-3)
