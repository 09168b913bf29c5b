"""What happens to every request before its route: a name, a key, a limit. Plain ASGI: one call a message, no copies."""

from __future__ import annotations

import hmac
import re
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/openapi.json"})
"""These need no key: they tell nothing of anyone's requests."""


class RequestId:
    """X-Request-Id: the client's own, if it is 1 to 128 visible ASCII characters, else a fresh one; on every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_named)


class BearerToken:
    """401 for whoever does not send `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await error.response()(scope, receive, send)


class BodyLimit:
    """413 for a body of more than `most` bytes, found by its announced length or while it comes."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        problem = f"the body may have at most {self._most} bytes"
        if announced.isdecimal() and int(announced) > self._most:
            await ApiError(413, problem, headers={"Connection": "close"}).response()(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._most:
                    raise HTTPException(413, problem, {"Connection": "close"})
            return message

        await self._app(scope, receive_counted, send)
