"""How a request's body becomes an object: in time that is proportional to its size, and small.

All of it happens on the event loop, where it holds up every stream. The standard parser takes seconds for the worst
4 MiB, this one a tenth of that; and the models (`gateway/schema.py`) stop at the first error of a list.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

MAX_FIELDS = 256
"""Of the body itself; there are fewer parameters. Each unknown one would be reported."""


class JsonRoute(APIRoute):
    """For `APIRouter(route_class=…)` of routes that read a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body. Raises JSONDecodeError, which becomes an answer, for what is no JSON or no request of ours."""
        try:
            body = _decode(await self.body())
        except (msgspec.DecodeError, RecursionError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise json.JSONDecodeError(f"an object of {len(body)} fields is no request", "", 0)
        return body


def _decode(text: bytes) -> Any:
    """Without the garbage collector, which would look again and again through what is only being built."""
    gc.disable()
    try:
        return msgspec.json.decode(text)
    finally:
        gc.enable()
