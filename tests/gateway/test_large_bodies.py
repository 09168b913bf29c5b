"""The largest body that is let in, written to be as costly as can be, holds up the other streams for a moment only."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from client.tokenizer import Tokenizer
from tests.client.scripted_server import ScriptedServer
from tests.gateway.in_process import ask
from tests.gateway.wire import CHAT, TEXT

MOMENT_S = 4.0
"""A tenth of that on an idle machine. Read and checked the usual way, most of these take 5 to 15 s."""

BODIES: dict[str, tuple[str, Any]] = {
    "texts": (TEXT, {"prompt": ["a"] * 800_000}),
    "numbers": (TEXT, {"prompt": [1.5] * 800_000}),
    "empty lists": (TEXT, {"prompt": [[]] * 1_000_000}),
    "parameters": (TEXT, {"prompt": "a", **{f"x{i}": 1 for i in range(300_000)}}),
    "biases": (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}}),
    "choices": (TEXT, {"prompt": "a", "guided_choice": [1] * 1_000_000}),
    "messages": (CHAT, {"messages": [{"role": 1, "content": [{"type": "x"}]}] * 90_000}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}] * 200_000}]}),
    "token ids": (TEXT, {"prompt": [1] * 1_000_000}),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_loop_goes_on_turning(tmp_path: Path, name: str) -> None:
    path, body = BODIES[name]
    content = json.dumps(body, separators=(",", ":")).encode()
    assert 1_000_000 < len(content) < 4 * 2**20

    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        longest, before, asked = 0.0, time.monotonic(), asyncio.Event()

        async def watch() -> None:
            nonlocal longest, before
            while not asked.is_set():
                await asyncio.sleep(0)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()

        watching = asyncio.create_task(watch())
        answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
        asked.set()
        await watching
        assert answer.status_code == 400, answer.text
        assert longest < MOMENT_S

    ask(tmp_path, None, question)


def test_a_large_prompt_is_tokenised_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one text is being tokenised, another request is answered."""
    text = "word " * 150_000

    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        answered: list[str] = []

        async def large() -> None:
            answer = await client.post(TEXT, json={"prompt": text, "max_tokens": 1})
            answered.append("large")
            assert answer.status_code in (200, 400)

        async def small() -> None:
            while not tokenising.is_set():
                await asyncio.sleep(0)
            answer = await client.post(TEXT, json={"prompt": [97], "max_tokens": 1})
            answered.append("small")
            assert answer.json()["choices"][0]["text"] == "a"

        await asyncio.gather(large(), small())
        assert answered == ["small", "large"]

    tokenising = asyncio.Event()
    encode = Tokenizer.encode

    def told(self: Tokenizer, given: str, **options: Any) -> list[int]:
        if given == text:
            tokenising.set()
        return encode(self, given, **options)

    monkeypatch.setattr(Tokenizer, "encode", told)
    ask(tmp_path, None, question)
