"""What happens to every request before its route: a name, a key, a limit. Plain ASGI: one call a message, no copies."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import RETRY_AFTER_S, ApiError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/", "/health", "/version", "/docs", "/openapi.json"})
DOCS_FOLDER = "/docs/files/"
"""Scripts and styles of /docs."""
OPEN_FOLDERS = ("/page/", DOCS_FOLDER)
"""These need no key: they tell nothing of anyone's requests."""
BODY_TIMEOUT_S = 60.0
"""A body is complete by then, counted from the request's head."""
MAX_BODY_BYTES_IN_ALL = 256 * 2**20
"""Of all requests that are being served."""


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
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
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
    """413 for a body of more than `most` bytes, found by its announced length or while it comes; 408 for one that comes
    too slowly; 503 while the bodies of all requests together would take too much memory."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most
        self._most_in_all = max(MAX_BODY_BYTES_IN_ALL, most)
        self._held = 0
        """Bytes of the bodies of all requests that are being served."""

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
        complete = False
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def receive_counted() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()  # nothing comes but the end
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body was not complete within {BODY_TIMEOUT_S:g} s", {"Connection": "close"}
                ) from None
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                seen += size
                self._held += size
                complete = not message.get("more_body", False)
                if seen > self._most:
                    raise HTTPException(413, problem, {"Connection": "close"})
                if self._held > self._most_in_all:
                    headers = {"Connection": "close", "Retry-After": RETRY_AFTER_S}
                    raise HTTPException(503, "too many large requests at once", headers)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held -= seen


class KnownHost:
    """403 for a request to a server on loopback by a name that is not its own.

    A page of another site can make a browser resolve that site's name to 127.0.0.1 and then ask us as if we were that
    site (DNS rebinding); its own name stays in the Host header. An address or `localhost` cannot be had that way.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            if not self._known(given):
                error = ApiError(403, f"this server is not {given!r}; see allowed_hosts", code="unknown_host")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, given: str) -> bool:
        name = _PORT.sub("", given).lower().rstrip(".")
        return not name or name in self._names or name == "localhost" or name.endswith(".localhost") or is_address(name)


_PORT = re.compile(r":\d*$")


def is_address(name: str) -> bool:
    """Whether a host is written as an IP address, with or without brackets."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def on_loopback(host: str) -> bool:
    """Whether listening on `host` lets in nobody but this machine. A name other than localhost may mean anything."""
    return host.lower() == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
