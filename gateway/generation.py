"""One HTTP request's way through the engine: prompts × n choices side by side, as deltas. Knows no JSON, no SSE."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from client import AsyncClient, Chunk, ClientError, Stream, TokenLogprobs
from client.detokenizer import IncrementalDetokenizer
from gateway.errors import ApiError, from_client, unavailable
from gateway.metrics import RequestClock
from gateway.output import OutputText
from gateway.state import Gateway
from protocol.messages import SamplingParams


@dataclass(slots=True)
class Delta:
    """More of one choice. finish_reason is set in the last one of each; stop_reason: the stop string, or the stop token
    that the request named."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """If asked for, one with each token."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """In the first delta of a choice that was asked for them."""


@dataclass(frozen=True)
class Order:
    """What is to be generated. Choices are numbered prompt by prompt, n each; timeout_s: until the last token."""

    request_id: str
    prompts: Sequence[list[int]]
    sampling: SamplingParams
    prompt_param: str
    """Where the client wrote its prompt, for errors."""
    n: int = 1
    echoes: bool = False
    """Every choice needs what is told of its prompt; otherwise the first of each prompt tells for all."""
    prompt_only: bool = False
    """What is generated is thrown away."""
    stops: Sequence[str] = ()
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


class _Choice:
    """One output."""

    def __init__(self, job: Job, index: int, detokenizer: IncrementalDetokenizer, client: AsyncClient):
        order, gateway = job.order, job.gateway
        self._job = job
        self._client = client
        self.index = index
        sampling = order.sampling
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index % order.n) % 2**64)
        if index % order.n and not order.echoes:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        named = frozenset(sampling.stop_token_ids)
        self._named = named
        self._text = OutputText(
            detokenizer,
            stop_ids=named if sampling.ignore_eos else named | frozenset(gateway.model.eos_token_ids),
            stops=order.stops,
            include_stop=order.include_stop,
            min_tokens=sampling.min_tokens,
        )
        self.stream: Stream = client.generate(
            order.prompts[index // order.n],
            sampling,
            request_id=f"{order.request_id}-{job.suffix}-{index}",
            priority=order.priority,
            cache_salt=order.cache_salt,
            detokenize=False,
        )
        self._clock = RequestClock(gateway.metrics)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.ended = False
        self._failure: ApiError | None = None

    async def next(self) -> Delta:
        """The next delta; one that is the last ends the choice. Raises ApiError."""
        if self._failure is not None:
            raise self._failure
        before = len(self._text.token_ids)
        while True:
            chunk = await self._read()
            told, prompt = chunk.logprobs, chunk.prompt_logprobs
            known = len(self._text.token_ids)
            text = self._text.push(chunk.token_ids)
            new = self._text.token_ids[before:]
            if len(self._text.token_ids) > known:
                self._clock.tokens(len(self._text.token_ids) - known)
            if self._text.stop_string is not None and chunk.finish_reason is None:
                chunk = await self._end_here()
            told = None if told is None else told[: len(new)]
            if chunk.finish_reason is not None:
                return self._complete(self._last(chunk, text, new), told, prompt)
            if text or self._job.every_token or before == 0:
                return self._complete(Delta(self.index, text, new), told, prompt)

    def _complete(
        self,
        delta: Delta,
        logprobs: Sequence[TokenLogprobs | None] | None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> Delta:
        delta.logprobs, delta.prompt_logprobs = logprobs, prompt_logprobs
        if self._job.order.prompt_only:
            delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", (), logprobs and (), None
            if delta.finish_reason is not None:
                delta.finish_reason, self.completion_tokens = "length", 0
        return delta

    async def _end_here(self) -> Chunk:
        """A stop string is complete: have the scheduler end the request, and hear its last word: the usage."""
        await self._client.abort(self.stream.request_id, "stop")
        while True:
            chunk = await self._read()
            if chunk.finish_reason is not None:
                return chunk

    def _last(self, chunk: Chunk, text: str, new: Sequence[int]) -> Delta:
        assert chunk.usage is not None
        text += self._text.flush()
        finish: str = chunk.finish_reason or ""
        reason: str | int | None = None
        if self._text.stop_string is not None:
            finish, reason = "stop", self._text.stop_string
        elif finish == "stop":
            last = self._text.token_ids[-1]
            reason = last if last in self._named else None
        elif finish == "kv_capacity":
            finish, reason = "length", "kv_capacity"
        elif finish == "abort":
            self._clock.finished("abort", 0)
            self._failure = unavailable("the request was ended by the server before it was complete", "aborted")
            if new:
                return Delta(self.index, text, new)  # what came before it is told before it
            raise self._failure
        self.ended = True
        self.completion_tokens = len(self._text.token_ids)
        self.cached_tokens = chunk.usage.cached_tokens
        self._clock.finished(finish, chunk.usage.prompt_tokens if self.index % self._job.order.n == 0 else 0)
        return Delta(self.index, text, new, finish, reason)

    async def close(self) -> None:
        """Abort it unless it has ended."""
        self._clock.finished("abort", 0)
        await self.stream.aclose()

    async def _read(self) -> Chunk:
        """The next chunk of the stream; waits while a replica lives or may come back, and no deadline has passed."""
        job = self._job
        loop = asyncio.get_running_loop()
        while True:
            patience = loop.time() + job.gateway.config.down_timeout_s
            try:
                async with asyncio.timeout_at(min(patience, job.deadline)):
                    return await anext(self.stream)
            except TimeoutError:
                pass
            except ClientError as error:
                self._clock.finished("error", 0)
                raise from_client(error, job.order.prompt_param) from None
            alive = await job.gateway.upstream.can_generate()
            if not alive:
                self._clock.finished("error", 0)
                raise unavailable("no worker is alive to serve the request", "no_replica")
            if loop.time() >= job.deadline:
                self._clock.finished("error", 0)
                raise ApiError(
                    408, f"not complete after the timeout of {job.order.timeout_s:g} s", param="timeout", code="timeout"
                )


class Job:
    """All choices of one request. `next` until it returns None; `close` in any case: it frees what still runs."""

    def __init__(self, gateway: Gateway, order: Order, *, wants_ids: bool = False):
        self.gateway = gateway
        self.order = order
        self.wants_ids = wants_ids
        self.every_token = wants_ids or order.sampling.logprobs is not None
        """Deltas without text count too."""
        self.suffix = uuid4().hex[:12]
        """Makes the scheduler's request ids unique though clients may repeat theirs."""
        now = asyncio.get_running_loop().time()
        self.deadline = float("inf") if order.timeout_s is None else now + order.timeout_s
        self._choices: list[_Choice] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ready: deque[Delta | BaseException] = deque()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._left = 0

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(map(len, self.order.prompts))

    @property
    def completion_tokens(self) -> int:
        """Of all choices; valid at the end."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache, of the first choice of each prompt; valid at the end."""
        return sum(choice.cached_tokens for choice in self._choices[:: self.order.n])

    async def start(self) -> None:
        """Prepare the choices; nothing is sent before the first `next`. Raises ApiError."""
        count = len(self.order.prompts) * self.order.n
        detokenizers = await self.gateway.texts.detokenizers(count)
        try:
            client = await self.gateway.upstream.client()
        except ClientError as error:
            raise from_client(error, self.order.prompt_param) from None
        self._choices = [_Choice(self, index, detokenizers[index], client) for index in range(count)]
        self._left = count

    async def next(self) -> Delta | None:
        """What comes next of any choice; None when all have ended. Raises ApiError; then only `close` remains."""
        if self._left == 0:
            return None
        if len(self._choices) == 1:
            delta = await self._choices[0].next()
        else:
            delta = await self._next_of_many()
        if delta.finish_reason is not None:
            self._left -= 1
        return delta

    async def _next_of_many(self) -> Delta:
        if not self._readers:
            self._readers = [asyncio.create_task(self._read(choice)) for choice in self._choices]
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        found = self._ready.popleft()
        self._taken.set()
        if isinstance(found, BaseException):
            raise found
        return found

    async def _read(self, choice: _Choice) -> None:
        """Put what comes of one choice where `next` finds it; a reader that is slow holds only itself up."""
        try:
            while not choice.ended:
                delta = await choice.next()
                self._ready.append(delta)
                self._changed.set()
                while len(self._ready) > 2 * len(self._choices):
                    self._taken.clear()
                    await self._taken.wait()
        except Exception as error:  # handed to whoever calls `next`
            self._ready.append(error)
            self._changed.set()

    async def close(self) -> None:
        """Abort what has not ended."""
        for reader in self._readers:
            reader.cancel()
        for reader in self._readers:
            with suppress(asyncio.CancelledError):
                await reader
        for choice in self._choices:
            await choice.close()
