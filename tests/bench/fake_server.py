"""A server that answers within the event loop of the test, and clocks that know no real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from bench.target import TargetError
from bench.workload import Request

Result = TypeVar("Result")


class FakeServer:
    """A target that answers a token each `token_s` (0, 1, 2, …), except to requests that `fails` picks."""

    def __init__(
        self, name: str = "fake", fails: Callable[[Request], bool] = lambda request: False, token_s: float = 0.0
    ):
        self.name = name
        self.fails = fails
        self.token_s = token_s
        self.seen: list[Request] = []
        self.now = self.peak = 0

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        self.seen.append(request)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            for number in range(request.output_len):
                await asyncio.sleep(self.token_s)  # without a pace, a turn of the event loop
                if self.fails(request):
                    raise TargetError("out of luck")
                if answer is not None:
                    answer.append(number)
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


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time: its clock jumps to the next timer when nothing else is to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def run_virtually(work: Callable[[Callable[[], float]], Coroutine[Any, Any, Result]]) -> Result:
    """The result of `work(clock)`, run from time 0 in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work(runner.get_loop().time))
