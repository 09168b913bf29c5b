"""What all routes share: configuration, facts of the model, the line to the scheduler, tokenizer, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from gateway.errors import ApiError
from gateway.grammars import Grammars
from gateway.metrics import Metrics
from gateway.page.details import Details
from gateway.page.feed import Feed
from gateway.page.guard import Guard
from gateway.texts import Texts
from gateway.upstream import Upstream
from protocol.config import EngineConfig
from protocol.model_config import ModelConfig


class Gateway:
    """Use as `async with`: connects at the first need, disconnects at the end."""

    def __init__(self, config: EngineConfig, runtime: Path):
        self.config = config
        self.model = ModelConfig.from_folder(config.model)
        self.max_model_len = config.max_model_len or self.model.max_position_embeddings
        self.created = int(time.time())
        self.runtime = runtime
        self.upstream = Upstream(runtime)
        self.feed = Feed(self.upstream)
        self.details = Details(self.upstream)
        self.guard = Guard(config)
        self.texts = Texts(Path(config.model))
        self.grammars = Grammars(Path(config.model), self.model.vocab_size, self.model.eos_token_ids)
        self.metrics = Metrics(config.model_name)

    async def __aenter__(self) -> Gateway:
        self.texts.start_loading()
        self._watching = asyncio.create_task(self.upstream.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await self.upstream.close()
        self.texts.close()
        self.grammars.close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError(404) for a model that is not the one served. None: whatever is."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; served is {self.config.model_name!r}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    def check_length(self, prompt: Sequence[int], param: str) -> None:
        """Raises ApiError(400) for a prompt that leaves no room for a token: it need not be sent to be refused."""
        if len(prompt) >= self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens; with at least one to generate, at most "
                f"{self.max_model_len - 1} fit in the model's length of {self.max_model_len}",
                param=param,
                code="context_length_exceeded",
            )


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


Shared = Annotated[Gateway, Depends(gateway_of)]
"""A route's parameter of this type is the gateway."""
