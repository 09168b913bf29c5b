"""A server that answers within the event loop of the test, and a clock that only the looks at it advance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from bench.target import TargetError
from bench.workload import Request


class FakeServer:
    """A target that answers a token a turn of the loop, except to requests that `fails` picks."""

    def __init__(self, name: str = "fake", fails: Callable[[Request], bool] = lambda request: False):
        self.name = name
        self.fails = fails
        self.seen: list[Request] = []
        self.now = self.peak = 0

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def stream(self, request: Request) -> AsyncIterator[int]:
        self.seen.append(request)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            for _ in range(request.output_len):
                await asyncio.sleep(0)  # a turn of the event loop
                if self.fails(request):
                    raise TargetError("out of luck")
                yield 1
        finally:
            self.now -= 1


class Ticks:
    """A clock that advances one second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now
