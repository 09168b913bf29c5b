"""Pageplane itself, through its own client library. The only file of this folder that imports `client`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from bench.target import TargetError
from bench.workload import Request
from client import AsyncClient
from protocol.messages import SamplingParams


class PageplaneTarget:
    """Greedy generation at `endpoint`; without one, where the client library finds the running server."""

    def __init__(self, name: str, endpoint: str | None = None):
        self.name = name
        self._endpoint = endpoint
        self._client: AsyncClient | None = None

    async def open(self) -> None:
        client = AsyncClient(self._endpoint)
        try:
            await client.__aenter__()
        except (OSError, RuntimeError) as error:
            raise TargetError(f"{self.name}: {error}") from error
        self._client = client

    async def stream(self, request: Request) -> AsyncIterator[int]:
        assert self._client is not None, "open() comes first"
        sampling = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        finish_reason = None
        async for chunk in self._client.generate(list(request.prompt_token_ids), sampling=sampling):
            if chunk.token_ids:
                yield len(chunk.token_ids)
            finish_reason = chunk.finish_reason
        if finish_reason != "length":
            raise TargetError(f"ended with reason {finish_reason!r} instead of 'length'")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
