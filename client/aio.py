"""The asyncio client: one DEALER connection, any number of requests on it.

Knows when a server must be taken for dead. Silence alone is no sign: a recovery may take a while. So a request that
was silent for `silence_s` is asked after (Describe: do you live? Attach: do you still know it?), and only a server that
says nothing at all for `timeout_s` after that is unavailable.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, cast
from uuid import uuid4

import msgspec
import zmq
import zmq.asyncio

from client.calls import Call, Calls
from client.chat_template import Message
from client.chunk import Completion
from client.detokenizer import IncrementalDetokenizer
from client.errors import BrokenStream, ClientError, PromptError, RequestLost, RequestRejected, ServerUnavailable
from client.stream import Request, Stream
from client.tokenizer import Tokenizer
from protocol import arrays, codec
from protocol import messages as m
from protocol.logprobs import Logprobs
from protocol.runtime import RuntimeFolderError, alive, read_endpoints
from protocol.sockets import connect_dealer, fresh_identity

Prompt = str | Sequence[int] | Sequence[Message]
"""Plain text (sent as it is, no chat template), token ids, or a conversation."""

_Answer = TypeVar("_Answer", m.ServerInfo, m.Status, m.MetricsSnapshot, m.Snapshot, m.BlockInfo, m.RequestTable)
_PROFILE_REPORT_S = 30.0
"""How long the server waits for a worker to write its report."""
_GOODBYE_S = 1.0
"""How long closing waits for the server to confirm aborts."""


class AsyncClient:
    """Talks to one server. Use as `async with AsyncClient() as client:`; not across event loops.

    endpoint None: the server that was started last on this machine by this user.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = 10.0, silence_s: float = 5.0):
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._requests: dict[str, Request] = {}
        self._by_handle: dict[int, Request] = {}
        self._waiting: dict[type[Any], list[asyncio.Future[Any]]] = {}
        self._calls = Calls()
        self._heard_at = 0.0
        self._info: m.ServerInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = asyncio.Lock()
        self._asking_details = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()

    async def __aenter__(self) -> AsyncClient:
        """Connect. Raises ServerUnavailable when no server is known; one that is down shows at the first request."""
        self._loop = asyncio.get_running_loop()
        self.endpoint = self._endpoint or find_endpoint()
        self._context = zmq.asyncio.Context()
        try:
            socket = connect_dealer(cast(Any, self._context), self.endpoint, fresh_identity("client"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ServerUnavailable(f"{self.endpoint} is no address that can be connected to: {error}") from None
        self._socket = cast(zmq.asyncio.Socket, socket)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what still runs, wait shortly until the server has confirmed it, and disconnect."""
        for request in list(self._requests.values()):
            self._abandon(request)
        if self._requests and kind not in (ServerUnavailable, RequestLost):
            self._all_ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), _GOODBYE_S)
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._reader = self._watcher = None
        self._end_all(ClientError("the client was closed"))
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt,
        sampling: m.SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        detokenize: bool = True,
    ) -> Stream:
        """The answer to a prompt, as it is made. `detokenize=False`: ids only, no tokenizer is loaded for them."""
        request_id = request_id or uuid4().hex
        sampling = sampling or m.SamplingParams()

        async def start() -> tuple[Request, IncrementalDetokenizer | None]:
            token_ids = await self._encode(prompt)
            detokenizer = (await self.tokenizer()).detokenizer() if detokenize else None
            frame = _submit_frame(request_id, token_ids, sampling, priority, cache_salt)
            return self._submit(request_id, frame), detokenizer

        return Stream(
            request_id,
            start,
            self._abandon_from_anywhere,
            logprobs=sampling.logprobs is not None,
            prompt_logprobs=sampling.prompt_logprobs is not None,
        )

    async def complete(self, prompt: Prompt, sampling: m.SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer at once. `options` as for `generate`."""
        async with self.generate(prompt, sampling, **options) as stream:
            return Completion.join([chunk async for chunk in stream])

    async def generate_text(self, prompt: Prompt, sampling: m.SamplingParams | None = None, **options: Any) -> str:
        """The text of the whole answer."""
        return (await self.complete(prompt, sampling, **options)).text

    async def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        """End a request of this client; its stream gets a last chunk with `reason` as finish_reason.

        reason: stop if it is over for you, for example at a stop string; it only matters to the server's counters.
        """
        self._send(m.Abort(request_id, reason))

    async def status(self) -> m.Status:
        """One snapshot of workers, queues and blocks."""
        return await self._ask(m.GetStatus(), m.Status)

    async def snapshot(self, steps_after: Sequence[int] = ()) -> m.Snapshot:
        """What the live page shows; of each replica's step records those behind number steps_after[replica]."""
        return await self._ask(m.GetSnapshot(tuple(steps_after)), m.Snapshot)

    async def block(self, replica: int, block_id: int) -> m.BlockInfo:
        """One block's books."""
        async with self._asking_details:  # answers bear no number: one question at a time
            while True:
                info = await self._ask(m.GetBlock(replica, block_id), m.BlockInfo)
                if (info.replica, info.block_id) == (replica, block_id):
                    return info

    async def table(self, request_id: str) -> m.RequestTable:
        """Where the blocks of a request are."""
        async with self._asking_details:
            while True:
                table = await self._ask(m.GetTable(request_id), m.RequestTable)
                if table.request_id == request_id:
                    return table

    async def explain_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> m.PrefixExplanation:
        """How much of a prompt the server has cached, where, and what ends it. Raises RequestRejected."""
        token_ids = await self._encode(prompt)
        try:
            packed = arrays.pack(token_ids)
        except OverflowError:
            raise RequestRejected("invalid_request", "a token id is beyond 32 bits", "token_ids") from None
        with self._calls.open() as call:
            self._send(m.ExplainPrefix(call.query_id, packed, cache_salt))
            return cast(m.PrefixExplanation, await self._answer(call))

    async def trace(self, seconds: float) -> AsyncIterator[bytes]:
        """What happens in the server from now on, as pieces of Chrome's trace events: see `client.trace_file`.

        Raises RequestRejected.
        """
        with self._calls.open() as call:
            self._send(m.StartTrace(call.query_id, seconds))
            until = self._loop.time() + seconds + self._timeout_s
            last = False
            while not last:
                chunk = cast(m.TraceChunk, await self._answer(call, max(0.0, until - self._loop.time())))
                last = chunk.last
                yield chunk.events

    async def profile(self, replica: int = 0, *, steps: int = 20, seconds: float = 30.0) -> m.ProfileReport:
        """What the next steps of a replica's worker spend where; of fewer steps if that takes longer than `seconds`.

        Raises RequestRejected, with code overloaded if it is being profiled already, worker_lost if it dies.
        """
        with self._calls.open() as call:
            self._send(m.StartProfile(call.query_id, replica, steps, seconds))
            return cast(m.ProfileReport, await self._answer(call, seconds + _PROFILE_REPORT_S + self._timeout_s))

    async def _answer(self, call: Call, timeout_s: float | None = None) -> Any:
        """The next answer of a call, from a server that is expected to take no longer than `timeout_s`."""
        try:
            return await call.next(self._timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            raise self._unavailable() from None

    async def metrics(self) -> m.MetricsSnapshot:
        """Everything the server counts, of one moment."""
        return await self._ask(m.GetMetrics(), m.MetricsSnapshot)

    async def server_info(self) -> m.ServerInfo:
        """The model that is served. Asked once, then remembered."""
        if self._info is None:
            self._info = await self._ask(m.Describe(), m.ServerInfo)
        return self._info

    async def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer, read from its folder on this machine. Raises PromptError without one."""
        async with self._tokenizer_lock:
            if self._tokenizer is None:
                folder = Path((await self.server_info()).model_path)
                self._tokenizer = await asyncio.to_thread(Tokenizer, folder)
        return self._tokenizer

    async def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return (await self.tokenizer()).encode(prompt)
        if prompt and all(isinstance(part, dict) for part in prompt):
            return (await self.tokenizer()).encode_chat(cast(Sequence[Message], prompt))
        if any(not isinstance(part, int) for part in prompt):
            raise PromptError("a prompt is text, a list of token ids or a list of messages")
        return list(cast(Sequence[int], prompt))

    # ---------------------------------------------------------------------------------------------- connection

    def _submit(self, request_id: str, frame: bytes) -> Request:
        if request_id in self._requests:
            raise RequestRejected("duplicate_request", f"request {request_id} is still running", "request_id")
        request = Request(request_id, self._loop.time())
        self._send_frame(frame)
        self._requests[request_id] = request
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return request

    async def _ask(self, question: m.ClientToScheduler, kind: type[_Answer]) -> _Answer:
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(kind, []).append(future)
        try:
            self._send(question)
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            if future in self._waiting.get(kind, ()):  # nobody waits for it any more
                self._waiting[kind].remove(future)

    def _unavailable(self) -> ServerUnavailable:
        return ServerUnavailable(f"no answer from the server at {self.endpoint} within {self._timeout_s:g} s")

    def _send(self, message: m.ClientToScheduler) -> None:
        self._send_frame(codec.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self._reader is None:
            raise ClientError("the client is not connected; use it inside `async with`")
        if self._reader.done():
            raise ServerUnavailable(f"the connection to {self.endpoint} was given up after a bad message")
        # tried at once; what fails is in the future
        sent = cast("asyncio.Future[Any]", self._socket.send(frame, flags=zmq.DONTWAIT))
        if sent.done() and sent.exception() is not None:
            raise ServerUnavailable(f"the server at {self.endpoint} takes no more messages: {sent.exception()}")

    def _abandon(self, request: Request) -> None:
        """Nobody reads this request any more: abort it, but listen for its end."""
        if request.detached or request.ended:
            return
        request.detached = True
        with suppress(ServerUnavailable):
            self._send(m.Abort(request.request_id))

    def _abandon_from_anywhere(self, request: Request) -> None:
        """The same from a finaliser, which may run in any thread and after the end of the event loop."""
        if not self._loop.is_closed() and self._reader is not None:
            self._loop.call_soon_threadsafe(self._abandon_if_open, request)

    def _abandon_if_open(self, request: Request) -> None:
        if self._reader is not None:
            self._abandon(request)

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                self._heard_at = self._loop.time()
                self._handle(codec.scheduler_to_client.decode(frame))
        except codec.ProtocolError as error:
            self._end_all(BrokenStream(f"the server at {self.endpoint} sent a bad message: {error}"))
        except Exception as error:
            self._end_all(error)
            raise

    def _handle(self, message: m.SchedulerToClient) -> None:
        match message:
            case m.TokenBatch():
                self._add_tokens(message)
            case m.PromptLogprobsBatch():
                self._add_prompt_logprobs(message)
            case m.Accepted():
                if request := self._requests.get(message.request_id):
                    if request.handle is not None:
                        self._by_handle.pop(request.handle, None)
                    request.handle = message.handle
                    request.heard_at = self._heard_at
                    self._by_handle[message.handle] = request
            case m.Finished():
                if request := self._by_handle.get(message.handle):
                    self._forget(request)
                    request.finish(message)
            case m.Rejected():
                if request := self._requests.get(message.request_id):
                    self._reject(request, message)
                else:
                    refusal = RequestRejected(message.code, message.message, message.param)
                    self._calls.deliver(message.request_id, refusal)
            case m.PrefixExplanation() | m.TraceChunk() | m.ProfileReport():
                self._calls.deliver(message.query_id, message)
            case m.ServerInfo() | m.Status() | m.MetricsSnapshot() | m.Snapshot() | m.BlockInfo() | m.RequestTable():
                for future in self._waiting.pop(type(message), []):
                    if not future.done():
                        future.set_result(message)

    def _add_tokens(self, batch: m.TokenBatch) -> None:
        handles = arrays.unpack(batch.handles, "handles").tolist()
        indices = arrays.unpack(batch.indices, "indices").tolist()
        tokens = arrays.unpack(batch.tokens, "tokens").tolist()
        if not len(handles) == len(indices) == len(tokens):
            raise codec.MalformedFrame(f"{len(handles)} handles, {len(indices)} indices, {len(tokens)} tokens")
        logprobs = None if batch.logprobs is None else Logprobs(batch.logprobs)
        if logprobs is not None and len(logprobs) != len(tokens):
            raise codec.MalformedFrame(f"{len(logprobs)} logprobs of {len(tokens)} tokens")
        for place, (handle, index, token) in enumerate(zip(handles, indices, tokens, strict=True)):
            request = self._by_handle.get(handle)
            if request is None or request.detached or request.ended:
                continue  # aborted here; the server does not know yet
            request.heard_at = self._heard_at
            try:
                request.add(index, token, None if logprobs is None else logprobs.at(place))
            except BrokenStream as error:
                self._abandon(request)
                request.fail(error)

    def _add_prompt_logprobs(self, batch: m.PromptLogprobsBatch) -> None:
        logprobs = Logprobs(batch.logprobs)
        request = self._by_handle.get(batch.handle)
        if request is None or request.detached or request.ended:
            return
        request.heard_at = self._heard_at
        try:
            request.add_prompt(batch.start, [logprobs.at(place) for place in range(len(logprobs))])
        except BrokenStream as error:
            self._abandon(request)
            request.fail(error)

    def _reject(self, request: Request, message: m.Rejected) -> None:
        self._forget(request)
        if message.code == "unknown_request" and request.attached:
            request.fail(RequestLost(f"the server was restarted and lost request {request.request_id}; send it again"))
        else:
            request.fail(RequestRejected(message.code, message.message, message.param))

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
        if not self._requests:
            self._all_ended.set()

    def _end_all(self, error: Exception) -> None:
        for request in list(self._requests.values()):
            self._forget(request)
            request.fail(error)
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        self._waiting.clear()
        self._calls.fail_all(error)

    async def _watch(self) -> None:
        """While requests run: ask after the silent ones, and give up on a server that does not even answer that."""
        unanswered_since: float | None = None
        while self._requests:
            await asyncio.sleep(min(self._silence_s, self._timeout_s) / 4)
            now = self._loop.time()
            if unanswered_since is not None and self._heard_at > unanswered_since:
                unanswered_since = None
            if unanswered_since is not None and now - unanswered_since >= self._timeout_s:
                self._end_all(self._unavailable())
                return
            silent = [
                request
                for request in self._requests.values()
                if now - max(request.heard_at, request.asked_at) >= self._silence_s
            ]
            if not silent:
                continue
            if unanswered_since is None:
                unanswered_since = now
            self._ask_after(silent)

    def ask_after_all(self) -> None:
        """The server may have been replaced: ask after every request now, not only once it has been silent."""
        self._ask_after(list(self._requests.values()))

    def _ask_after(self, requests: Sequence[Request]) -> None:
        with suppress(ServerUnavailable):
            self._send(m.Describe())
            for request in requests:
                request.asked_at = self._loop.time()
                request.attached = True
                self._send(m.Attach(request.request_id, len(request.token_ids)))


def find_endpoint() -> str:
    """Where the server that this user started last listens. Raises ServerUnavailable when it is not running."""
    try:
        endpoints = read_endpoints()
    except RuntimeFolderError as error:
        raise ServerUnavailable(str(error)) from None
    if endpoints.pid and not alive(endpoints.pid):
        raise ServerUnavailable(
            f"the server that listened at {endpoints.client} is gone; start one with: python launch.py --workers 2"
        )
    return endpoints.client


def _submit_frame(
    request_id: str, token_ids: Sequence[int], sampling: m.SamplingParams, priority: int, cache_salt: str
) -> bytes:
    """A Submit that the server can decode: types and ranges of the wire are checked here, meaning there."""
    try:
        packed = arrays.pack(token_ids)
    except OverflowError:
        raise RequestRejected("invalid_request", "a token id is beyond 32 bits", "prompt") from None
    try:
        sampling = msgspec.convert(msgspec.to_builtins(sampling), m.SamplingParams, strict=True)
        return codec.encode(m.Submit(request_id, packed, sampling, priority, cache_salt))
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        place = re.search(r"\$\[(\d+)\]", path)  # structs travel as arrays: the path counts fields
        name = m.SamplingParams.__struct_fields__[int(place[1])] if place else "sampling"
        raise RequestRejected("invalid_request", f"{name}: {problem}", name) from None
    except (OverflowError, TypeError) as error:
        raise RequestRejected("invalid_request", f"sampling parameters: {error}", "sampling") from None
