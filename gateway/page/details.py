"""Questions about one block or one table, of all pages together few a second: who holds a block is searched for in all
tables, and however many people point at blocks, the scheduler's steps must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from client import AsyncClient
from gateway.upstream import Upstream

PAUSE_S = 0.02
"""Between an answer and the next question."""

_Answer = TypeVar("_Answer")


class Details:
    """One question at a time, first come, first served."""

    def __init__(self, upstream: Upstream, *, pause_s: float = PAUSE_S):
        self._upstream = upstream
        self._pause_s = pause_s
        self._turn = asyncio.Lock()
        self._next_at = float("-inf")

    async def ask(self, question: Callable[[AsyncClient], Awaitable[_Answer]]) -> _Answer:
        """The answer. Raises ClientError."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_at - loop.time())
            try:
                return await question(await self._upstream.client())
            finally:
                self._next_at = loop.time() + self._pause_s
