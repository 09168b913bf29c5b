"""A simulated client: submits, reads its streams, aborts, moves to a new connection, leaves. It trusts nobody.

Every token must arrive exactly once, with contiguous indices, and nothing behind the last message of a stream.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.arrays import unpack
from protocol.messages import (
    Abort,
    Accepted,
    Attach,
    ClientToScheduler,
    Finished,
    Rejected,
    SchedulerToClient,
    Submit,
    TokenBatch,
)
from tests.sim.scenario import PlannedRequest


class Stream:
    """One request as its client sees it."""

    def __init__(self, planned: PlannedRequest):
        self.planned = planned
        self.tokens: list[int] = []
        self.connection = b""
        self.left: bytes | None = None
        """The connection it moves away from: kept until the new one is accepted, or it would count as abandoned."""
        self.handle: int | None = None
        self.finished: Finished | None = None
        self.rejected: Rejected | None = None
        self.aborted = False
        self.moved = False

    @property
    def settled(self) -> bool:
        return self.finished is not None or self.rejected is not None


Send = Callable[[bytes, ClientToScheduler], None]


class SimulatedClient:
    """`send(identity, message)` puts a message on its way. `leaves_after`: tokens until it is gone without a word."""

    def __init__(self, number: int, send: Send, leaves_after: int | None):
        self.number = number
        self.send = send
        self.leaves_after = leaves_after
        self.gone = False
        self.connections = 1
        self.identity = self._new_identity()
        self.open = {self.identity}
        self.streams: dict[str, Stream] = {}
        self.by_handle: dict[tuple[bytes, int], Stream] = {}

    def submit(self, planned: PlannedRequest) -> None:
        if self.gone:
            return
        stream = Stream(planned)
        stream.connection = self.identity
        self.streams[planned.request_id] = stream
        prompt = b"".join(token.to_bytes(4, "little") for token in planned.prompt)
        self.send(self.identity, Submit(planned.request_id, prompt, planned.sampling, planned.priority, planned.salt))
        self._react(stream)

    def receive(self, identity: bytes, message: SchedulerToClient) -> None:
        match message:
            case Accepted(request_id, handle, prompt_tokens):
                stream = self.streams[request_id]
                assert prompt_tokens == len(stream.planned.prompt)
                if identity == stream.connection:
                    stream.handle, stream.left = handle, None
                    self.by_handle[identity, handle] = stream
                    self._close_what_is_idle()
                    self._react(stream)
            case TokenBatch(_, handles, indices, tokens):
                self._tokens(identity, handles, indices, tokens)
            case Finished(handle):
                stream = self.by_handle[identity, handle]
                if identity == stream.connection:
                    assert stream.finished is None, f"{stream.planned.request_id} finished twice"
                    stream.finished = message
                    self._close_what_is_idle()
            case Rejected(request_id, code):
                stream = self.streams[request_id]
                if code == "unknown_request":
                    assert stream.aborted, message
                    return  # it had ended before the abort arrived
                assert stream.handle is None, f"{message} after it was accepted"
                stream.rejected = message
            case _:
                raise AssertionError(message)

    def _tokens(self, identity: bytes, handles: bytes, indices: bytes, tokens: bytes) -> None:
        columns = unpack(handles).tolist(), unpack(indices).tolist(), unpack(tokens).tolist()
        for handle, index, token in zip(*columns, strict=True):
            stream = self.by_handle[identity, handle]
            if identity != stream.connection:
                continue  # said to the old connection before the move arrived; the new one gets it again
            name = stream.planned.request_id
            assert not stream.settled, f"{name}: token {index} after the end"
            assert index == len(stream.tokens), f"{name}: token {index} came, {len(stream.tokens)} was to come"
            stream.tokens.append(token)
            self._react(stream)

    def _react(self, stream: Stream) -> None:
        """Do what the scenario has in store for this moment of the stream."""
        if self.gone:
            return
        if self.leaves_after is not None and sum(len(s.tokens) for s in self.streams.values()) >= self.leaves_after:
            self.gone = True
            self.open.clear()
            return
        planned, count = stream.planned, len(stream.tokens)
        if planned.abort_after is not None and count >= planned.abort_after and not stream.aborted:
            stream.aborted = True
            self.send(stream.connection, Abort(planned.request_id))
        if planned.move_after is not None and count >= planned.move_after and not stream.moved and stream.handle:
            stream.moved = True
            self.connections += 1
            stream.left = stream.connection
            self.identity = stream.connection = self._new_identity()
            self.open.add(self.identity)
            stream.handle = None
            self.send(self.identity, Attach(planned.request_id, count))

    def _close_what_is_idle(self) -> None:
        """Close old connections that no unfinished stream uses."""
        used = {stream.connection for stream in self.streams.values() if not stream.settled}
        left = {stream.left for stream in self.streams.values() if stream.left is not None}
        self.open &= used | left | {self.identity}

    def _new_identity(self) -> bytes:
        return f"client-{self.number}-{self.connections}".encode()
