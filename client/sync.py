"""The synchronous client: the asyncio one, run by a thread of its own. Safe to use from several threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

from client.aio import AsyncClient, Prompt
from client.chunk import Chunk, Completion
from client.tokenizer import Tokenizer
from protocol.messages import MetricsSnapshot, PrefixExplanation, ProfileReport, SamplingParams, ServerInfo, Status

_Result = TypeVar("_Result")


class Client:
    """As `AsyncClient`, without async. Use as `with Client() as client:`, or call `close` at the end."""

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = 10.0, silence_s: float = 5.0):
        """Connect. Raises ServerUnavailable when no server is known."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pageplane-client", daemon=True)
        self._thread.start()
        self._closed = False
        self._client = AsyncClient(endpoint, timeout_s=timeout_s, silence_s=silence_s)
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Generator[Chunk, None, None]:
        """The answer as it is made; leaving the loop early aborts the request. `options` as `AsyncClient.generate`."""
        stream = self._client.generate(prompt, sampling, **options)
        try:
            while True:
                try:
                    chunk = self._run(stream.__anext__())
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            if not self._closed:
                self._run(stream.aclose())

    def complete(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer at once."""
        return Completion.join(self.generate(prompt, sampling, **options))

    def generate_text(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> str:
        """The text of the whole answer."""
        return self.complete(prompt, sampling, **options).text

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk with finish_reason "abort"."""
        self._run(self._client.abort(request_id))

    def status(self) -> Status:
        """One snapshot of workers, queues and blocks."""
        return self._run(self._client.status())

    def explain_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> PrefixExplanation:
        """How much of a prompt the server has cached, where, and what ends it."""
        return self._run(self._client.explain_prefix(prompt, cache_salt=cache_salt))

    def profile(self, replica: int = 0, *, steps: int = 20, seconds: float = 30.0) -> ProfileReport:
        """What the next steps of a replica's worker spend where."""
        return self._run(self._client.profile(replica, steps=steps, seconds=seconds))

    def metrics(self) -> MetricsSnapshot:
        """Everything the server counts, of one moment."""
        return self._run(self._client.metrics())

    def server_info(self) -> ServerInfo:
        """The model that is served."""
        return self._run(self._client.server_info())

    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""
        return self._run(self._client.tokenizer())

    def close(self) -> None:
        """Abort what still runs and disconnect. May be called more than once."""
        if not self._closed:
            self._closed = True
            try:
                self._run(self._client.__aexit__(None, None, None))
            finally:
                self._stop_loop()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
