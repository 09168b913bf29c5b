"""GET / and what the live page asks for. None of it is part of the API: it may change with the page."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from client import ClientError
from gateway.errors import ApiError, from_client
from gateway.page import encoding, files
from gateway.page.feed import Viewer
from gateway.page.guard import TOKEN_HEADER
from gateway.page.killing import ask_to_kill
from gateway.sse import EventStream
from gateway.state import Gateway, Shared
from gateway.version import VERSION
from protocol.arrays import unpack
from protocol.messages import BLOCK_STATES, REQUEST_COLUMNS, STEP_COLUMNS

router = APIRouter(include_in_schema=False)
_FILES = files.load()


class KillBody(BaseModel):
    """Which start of which worker."""

    model_config = ConfigDict(extra="forbid")
    worker_id: str
    incarnation: str


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _file(request, "index.html")


@router.get("/page/{name}")
async def file(name: str, request: Request) -> Response:
    """A file that belongs to it."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    found = _FILES.get(name)
    if found is None:
        raise ApiError(404, f"the page has no file {name!r}")
    headers = {**files.HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


@router.get("/v1/page/events")
async def events(request: Request, gateway: Shared) -> Response:
    """hello once, then snapshot (or lost) whenever there is news, until the page leaves."""
    viewer: Viewer = gateway.feed.join()
    return EventStream(encoding.event("hello", _hello(gateway, request)), viewer)


def _hello(gateway: Gateway, request: Request) -> dict[str, Any]:
    return {
        "model": gateway.config.model_name,
        "version": VERSION,
        "max_model_len": gateway.max_model_len,
        "block_size": gateway.config.block_size,
        "groups": [
            {"sliding_window": group.sliding_window, "layers": len(group.layer_ids)}
            for group in gateway.model.cache_groups
        ],
        "block_states": BLOCK_STATES,
        "request_columns": ("id", *REQUEST_COLUMNS),
        "step_columns": STEP_COLUMNS,
        "kill": {
            "token": gateway.guard.token_for(request),
            "header": TOKEN_HEADER,
            "why_not": gateway.guard.refusal(request) or "",
        },
    }


@router.get("/v1/page/block")
async def block(replica: int, block_id: int, gateway: Shared) -> Response:
    """Everything about one block."""
    if not (0 <= replica < 2**31 and 0 <= block_id < 2**31):
        raise ApiError(400, "replica and block_id are not negative and below 2^31")
    try:
        info = await gateway.details.ask(lambda client: client.block(replica, block_id))
    except ClientError as error:
        raise from_client(error, "block_id") from None
    content = {name: getattr(info, name) for name in info.__struct_fields__}
    content["block_hash"] = info.block_hash.hex()
    content["indices"] = unpack(info.indices).tolist()
    return _json(content)


@router.get("/v1/page/table")
async def table(request_id: str, gateway: Shared) -> Response:
    """The block table of a running request; without tables if it does not run."""
    try:
        found = await gateway.details.ask(lambda client: client.table(request_id))
    except ClientError as error:
        raise from_client(error, "request_id") from None
    content = {name: getattr(found, name) for name in found.__struct_fields__}
    content["tables"] = [unpack(ids).tolist() for ids in found.tables]
    return _json(content)


@router.post("/v1/page/kill")
async def kill(body: KillBody, request: Request, gateway: Shared) -> Response:
    """kill -9 for a worker. 202: the word is on its way; the page will see the worker die."""
    gateway.guard.check_kill(request)
    status = await gateway.upstream.status()
    workers = {worker.worker_id: worker for worker in status.workers} if status else {}
    worker = workers.get(body.worker_id)
    if worker is None:
        raise ApiError(404, f"there is no worker {body.worker_id!r}")
    if worker.state != "ready" or worker.incarnation != body.incarnation:
        raise ApiError(409, f"that process of {body.worker_id} is gone already", code="gone")
    if not ask_to_kill(gateway.runtime, body.worker_id, body.incarnation):
        raise ApiError(503, "the scheduler cannot be reached", code="service_unavailable")
    return _json({"worker_id": body.worker_id, "pid": worker.pid}, 202)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, {"Cache-Control": "no-store"}, media_type="application/json")
