"""Server-sent events, and what to do when the client leaves: stop the work, at once. Knows nothing of what is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, ClientLeft

log = logging.getLogger("gateway")

DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")


class Events(Protocol):
    """Whole events in bytes, one or more at a time; None at the end. `close` in any case."""

    async def next(self) -> bytes | None: ...

    async def close(self) -> None: ...


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is cancelled when the client leaves; that raises ClientLeft. The request's body must
    have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)  # their work is undone before anything follows


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer that is a stream of events. An error in the middle becomes an event of its own, and nothing follows it:
    neither a finish_reason nor [DONE] pretends that the answer is complete."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: Events):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._pump(send))
        except ClientLeft:
            pass
        finally:
            await self._events.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        piece: bytes | None = self._first
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await self._next()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        try:
            return await self._events.next()
        except ApiError as error:
            return self._failed(error)
        except Exception:
            log.exception("a stream failed")
            return self._failed(ApiError(500, "internal error; the gateway's log says more"))

    def _failed(self, error: ApiError) -> bytes:
        self._events = _Over(self._events.close)
        return b"data: " + error.body + b"\n\n"


class _Over:
    """After an error there is nothing more."""

    def __init__(self, close: Callable[[], Awaitable[None]]):
        self._close = close

    async def next(self) -> bytes | None:
        return None

    async def close(self) -> None:
        await self._close()
