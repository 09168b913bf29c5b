"""Pageplane itself, through its own client library. The only file of this folder that imports `client`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from bench.target import TargetError
from bench.workload import Request
from client import AsyncClient, ClientError, PromptError
from protocol.messages import SamplingParams


class PageplaneTarget:
    """Greedy generation at `endpoint`; without one, where the client library finds the running server.

    The tokens are made into text as they come, as the HTTP servers beside it must, unless the served model has no
    tokenizer.
    """

    def __init__(self, name: str, endpoint: str | None = None):
        self.name = name
        self._endpoint = endpoint
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None
        self._detokenize = True

    async def open(self) -> None:
        try:
            client = await self._stack.enter_async_context(AsyncClient(self._endpoint))
            await client.server_info()
            try:
                await client.tokenizer()  # loaded before the first request is timed
            except PromptError:
                self._detokenize = False
        except ClientError as error:
            raise TargetError(f"{self.name}: {error}") from error
        self._client = client

    async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        assert self._client is not None, "open() comes first"
        sampling = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        prompt = list(request.prompt_token_ids)
        finish_reason = None
        try:
            async with self._client.generate(prompt, sampling, detokenize=self._detokenize) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        if answer is not None:
                            answer.extend(chunk.token_ids)
                        yield len(chunk.token_ids)
                    finish_reason = chunk.finish_reason
        except ClientError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        if finish_reason != "length":
            raise TargetError(f"ended with reason {finish_reason!r} instead of 'length'")

    @property
    def client(self) -> AsyncClient:
        """The connection itself, to ask the server about what it does meanwhile."""
        assert self._client is not None, "open() comes first"
        return self._client

    async def close(self) -> None:
        await self._stack.aclose()
        self._client = None
