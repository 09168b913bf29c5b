"""One request as its client sees it: what has come, in order, and what the reader has not taken yet. No sockets.

`Request` is held by the connection and fed from the wire. `Stream` is held by the user: an async iterator over chunks
that, once dropped, closed or left early, aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from client.chunk import Chunk
from client.detokenizer import IncrementalDetokenizer
from client.errors import BrokenStream, GenerationFailed
from protocol.logprobs import TokenLogprobs
from protocol.messages import Finished, FinishReason, Usage


class Request:
    """The client's record of one request: every output token so far, and how it ended."""

    def __init__(self, request_id: str, now: float):
        self.request_id = request_id
        self.handle: int | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        """With each output token what is told of its probability."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """The same of the prompt, as far as it has come; nothing of the first token."""
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.error: Exception | None = None
        self.detached = False
        """Nobody reads it any more; it is kept until the server has said its last word."""
        self.attached = False
        """Attach was sent: tokens that were under way at that time may come twice, and must then be the same."""
        self.heard_at = now
        self.asked_at = now
        self.changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, index: int, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Token number `index` of the output arrived. Raises BrokenStream on a gap or a repeat."""
        expected = len(self.token_ids)
        if index == expected:
            self.token_ids.append(token)
            self.logprobs.append(logprobs)
            self.changed.set()
        elif not (self.attached and 0 <= index < expected and self.token_ids[index] == token):
            what = "is missing" if index > expected else f"came twice (first {self.token_ids[index]}, now {token})"
            lost = expected if index > expected else index
            raise BrokenStream(f"request {self.request_id}: output token {lost} {what}")

    def add_prompt(self, start: int, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """What is told of the prompt from index `start` on arrived. Raises BrokenStream on a gap."""
        known = len(self.prompt_logprobs) - start
        if known < 0:
            raise BrokenStream(f"request {self.request_id}: logprobs of prompt token {start + known} are missing")
        self.prompt_logprobs += logprobs[known:]

    def finish(self, message: Finished) -> None:
        """The server's last word. Its token count must be ours."""
        if message.reason == "error":
            self.fail(GenerationFailed(f"request {self.request_id}: {message.message or 'failed'}"))
        elif message.usage.completion_tokens != len(self.token_ids):
            self.fail(
                BrokenStream(
                    f"request {self.request_id}: {len(self.token_ids)} tokens arrived, "
                    f"the server counts {message.usage.completion_tokens}"
                )
            )
        else:
            self.finish_reason, self.usage = message.reason, message.usage
            self.changed.set()

    def fail(self, error: Exception) -> None:
        """It ends with an error, raised after the tokens that came before it."""
        if not self.ended:
            self.error = error
            self.changed.set()


class Stream:
    """Async iterator over the chunks of one request. The request is sent when the first chunk is asked for.

    Raises ClientError as it happens: RequestRejected before the first chunk, GenerationFailed, ServerUnavailable or
    BrokenStream after the chunks that arrived. Use it as a context manager, or just leave the loop: either way a
    request that has not ended is aborted.
    """

    def __init__(
        self,
        request_id: str,
        start: Callable[[], Awaitable[tuple[Request, IncrementalDetokenizer | None]]],
        abandon: Callable[[Request], None],
        *,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
    ):
        self.request_id = request_id
        self._start = start
        self._abandon = abandon
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._request: Request | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        self._taken = 0
        self._closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        if self._request is None:
            self._request, self._detokenizer = await self._start()
        request = self._request
        while self._taken == len(request.token_ids) and not request.ended:
            request.changed.clear()
            await request.changed.wait()
        new = request.token_ids[self._taken :]
        if request.ended and not (request.error and new):
            self._closed = True
            if request.error:
                raise request.error
        first, self._taken = self._taken, len(request.token_ids)
        return Chunk(
            request_id=self.request_id,
            text=self._text(new),
            token_ids=tuple(new),
            indices=tuple(range(first, self._taken)),
            finish_reason=request.finish_reason,
            usage=request.usage,
            logprobs=tuple(request.logprobs[first : self._taken]) if self._logprobs else None,
            prompt_logprobs=tuple(request.prompt_logprobs) if self._prompt_logprobs and first == 0 and new else None,
        )

    def _text(self, new: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(new)
        return text + self._detokenizer.flush() if self._closed else text

    async def aclose(self) -> None:
        """Stop reading; abort the request unless it has ended. May be called more than once."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        if self._request is not None and not self._request.ended:
            self._abandon(self._request)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._close()
