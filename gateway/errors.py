"""Errors as OpenAI shapes them: {"error": {"message", "type", "param", "code"}}, whoever found them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from client import ClientError, GenerationFailed, RequestLost, RequestRejected

log = logging.getLogger("gateway")

RETRY_AFTER_S = "1"
_KINDS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class ApiError(Exception):
    """An answer that is an error. kind: OpenAI's `type`; param: the name of the parameter at fault, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON text, of characters that UTF-8 has whatever the client sent."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": {name: _printable(value) for name, value in error.items()}})

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, media_type="application/json")


def _printable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """503: not now, but the same request may be served later."""
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers={"Retry-After": RETRY_AFTER_S})


def from_client(error: ClientError, prompt_param: str) -> ApiError:
    """What went wrong on the way to the model, as an answer. prompt_param: where the client wrote its prompt."""
    if isinstance(error, RequestRejected):
        param = {"token_ids": prompt_param, "": None}.get(error.param, error.param)
        match error.code:
            case "overloaded":
                return ApiError(429, error.message, code="overloaded", headers={"Retry-After": RETRY_AFTER_S})
            case "too_long":
                return ApiError(400, error.message, param=param, code="context_length_exceeded")
            case "shutting_down":
                return unavailable(error.message, "shutting_down")
            case _:
                return ApiError(400, error.message, param=param, code=error.code)
    if isinstance(error, RequestLost):
        return unavailable(str(error), "request_lost")
    if isinstance(error, GenerationFailed):
        return ApiError(500, str(error), code="generation_failed")
    return unavailable(str(error))


def install(app: FastAPI) -> None:
    """Have every error of the application in OpenAI's shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientLeft, _nobody)
    app.add_exception_handler(Exception, _bug)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "")
    if request.method == "POST" and "json" not in kind:
        return ApiError(
            415, f"the body must be JSON, sent with Content-Type: application/json (it was {kind or 'not named'!r})"
        ).response()
    first = _most_telling(error.errors())
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json").response()
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized parameter: {param}", param=param, code="unknown_parameter").response()
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'body'} is missing", param=param, code="missing_parameter").response()
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code="invalid_value").response()


def _most_telling(found: Any) -> dict[str, Any]:
    """Each alternative of a union reports an error of its own. A wrong value tells more than a wrong type, which may
    only mean that another alternative was meant; then the one that got furthest into the value."""
    first: dict[str, Any] = found[0]
    alternatives = [error for error in found if tuple(error["loc"][:2]) == tuple(first["loc"][:2])]

    def telling(error: dict[str, Any]) -> tuple[bool, int]:
        return not error["type"].endswith("_type"), sum(isinstance(part, int) for part in error["loc"])

    return max(alternatives, key=telling)


def _param(location: tuple[int | str, ...]) -> str | None:
    """("body", "messages", 0, "content") → "messages[0].content"; names of a union's alternatives are left out."""
    text = ""
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _ALTERNATIVE.fullmatch(part):
            text += f".{part}" if text else part
    return text or None


_ALTERNATIVE = re.compile(r"chat|completion|str|int|float|bool|dict|TextPart|constrained-\w+|[\w-]+[\[(].*")
"""What pydantic calls the types of a union in an error's location."""


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path}: {error.detail}" if error.status_code in (404, 405) else error.detail
    )
    return ApiError(error.status_code, str(message), headers=error.headers).response()


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's "client closed request"; nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "internal error; the gateway's log says more").response()
