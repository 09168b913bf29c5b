"""The application without a deployment: in this process, before a scripted scheduler, asked over ASGI or HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.app import build
from gateway.connection import Connection, prepare
from protocol.config import EngineConfig
from protocol.runtime import Endpoints, publish
from tests.client.scripted_server import Handler, ScriptedServer
from tests.tiny_model import tiny_model


def ask(
    runtime: Path,
    handler: Handler | None,
    questions: Callable[[httpx.AsyncClient, ScriptedServer], Awaitable[Any]],
    **settings: Any,
) -> Any:
    """The result of `questions`, which get an HTTP client and the scheduler that answers by `handler`."""
    config = EngineConfig(model=str(tiny_model()), model_name="tiny", **settings)

    async def run() -> Any:
        app = build(config, runtime)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client,
        ):
            return await questions(client, server)

    with ScriptedServer(f"ipc://{runtime}/client.sock", tiny_model(), handler) as server:
        publish(runtime, Endpoints(client=server.endpoint, worker="", control=""))
        return asyncio.run(run())


@contextmanager
def serve(runtime: Path, handler: Handler | None, **settings: Any) -> Iterator[tuple[str, ScriptedServer]]:
    """The application behind a real listener of this process: its URL, and the scheduler that answers by `handler`."""
    config = EngineConfig(model=str(tiny_model()), model_name="tiny", **settings)
    with ScriptedServer(f"ipc://{runtime}/client.sock", tiny_model(), handler) as scheduler:
        publish(runtime, Endpoints(client=scheduler.endpoint, worker="", control=""))
        listener = socket.create_server((config.host, 0), backlog=128)
        prepare(listener)
        server = uvicorn.Server(
            uvicorn.Config(build(config, runtime), http=Connection, log_config=None, timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://{config.host}:{listener.getsockname()[1]}", scheduler
        finally:
            server.should_exit = True
            thread.join()
            listener.close()


def events(text: str) -> list[Any]:
    """The data of each event, parsed but for [DONE]."""
    assert text.endswith("\n\n")
    found = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in found]
