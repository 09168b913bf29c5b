"""The application: routes, error shapes and middleware around one `Gateway`. Opens nothing until it is started."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from gateway import errors
from gateway.middleware import DOCS_FOLDER, BearerToken, BodyLimit, KnownHost, RequestId, on_loopback
from gateway.routes import chat, completions, debug, health, metrics, models, page, tokens
from gateway.state import Gateway
from gateway.version import VERSION
from protocol.config import EngineConfig


def build(config: EngineConfig, runtime: Path) -> FastAPI:
    """The ASGI application of one deployment. runtime: the folder with its endpoints.json."""
    gateway = Gateway(config, runtime)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway:
            yield

    # FastAPI's own /docs is empty where the browser cannot reach a CDN; this one brings its scripts along
    app = FastAPIOffline(
        title="Pageplane", version=VERSION, lifespan=lifespan, redoc_url=None, static_url=DOCS_FOLDER.rstrip("/")
    )
    app.state.gateway = gateway
    for module in (chat, completions, models, tokens, health, metrics, debug, page):
        app.include_router(module.router)
    errors.install(app)
    # added last, asked first: every answer bears the request's id, also a refusal
    app.add_middleware(BodyLimit, most=config.max_request_bytes)
    if config.api_key:
        app.add_middleware(BearerToken, key=config.api_key)
    elif on_loopback(config.host):  # whoever has the key is trusted whatever name he uses
        app.add_middleware(KnownHost, names=config.allowed_hosts)
    app.add_middleware(RequestId)
    return app
