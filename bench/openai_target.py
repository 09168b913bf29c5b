"""Any server with OpenAI's `/v1/completions`, given token ids, streaming. Knows HTTP; measures nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from bench.sse import CompletionStream
from bench.target import TargetError
from bench.workload import Request


class OpenAITarget:
    """Greedy completions at `base_url` (without `/v1`). Without `model`, the first one the server lists is used."""

    def __init__(self, name: str, base_url: str, model: str | None = None, timeout_s: float = 600.0):
        self.name = name
        self.model = model
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s  # longest silence of one stream
        self._http: httpx.AsyncClient | None = None

    async def open(self) -> None:
        # No limit on connections: the load generator's concurrency is the limit, and a second one would hide here.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=self._base_url, timeout=self._timeout_s, limits=limits, trust_env=False)
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
            response.raise_for_status()
            models = [entry["id"] for entry in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise TargetError(f"{self.name}: {self._base_url}/v1/models does not answer: {error!r}") from error
        if self.model is None:
            if not models:
                raise TargetError(f"{self.name}: the server lists no model; name one with model=…")
            self.model = models[0]
        elif self.model not in models:
            raise TargetError(f"{self.name}: no model {self.model!r} there; it lists {models}")

    async def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        assert self._http is not None, "open() comes first"
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if answer is not None:
            body["return_token_ids"] = True  # vLLM's, and ours
        completion = CompletionStream()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise TargetError(f"HTTP {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    if new := completion.feed(line):
                        yield new
        except httpx.HTTPError as error:
            raise TargetError(f"the stream broke off: {error!r}") from error
        if not completion.done:
            raise TargetError(f"the stream ended after {completion.num_tokens} tokens without [DONE]")
        if answer is not None:
            answer.extend(completion.token_ids or await self._tokenize(completion.text))

    async def _tokenize(self, text: str) -> list[int]:
        """For a server that does not tell what it generated: the ids of the text, by its own tokenizer.

        They may differ from those generated where a text can be split in several ways. The body is that of vLLM's and
        of llama.cpp's `/tokenize` in one; each overlooks what it does not know.
        """
        assert self._http is not None
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
        try:
            response = await self._http.post("/tokenize", json=body)
            response.raise_for_status()
            return [int(token) for token in response.json()["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise TargetError(
                f"a conversation needs the tokens of an answer: neither token_ids nor /tokenize is there: {error!r}"
            ) from error

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None
