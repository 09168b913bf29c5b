"""A peer that speaks the wire itself, rightly or wrongly, without the client library's care."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq

from protocol import arrays, codec
from protocol import messages as m
from protocol.sockets import connect_dealer, fresh_identity

ANSWER_S = 10.0


class Peer:
    """A DEALER on any plane. Use with `with`. receive_limit: messages it takes before it reads them."""

    def __init__(self, endpoint: str, *, receive_limit: int = 0):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = endpoint
        if receive_limit:
            self.socket = self._context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.IDENTITY, fresh_identity("raw"))
            self.socket.setsockopt(zmq.RCVHWM, receive_limit)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.connect(endpoint)
        else:
            self.socket = connect_dealer(self._context, endpoint, fresh_identity("raw"))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gone without a word."""
        self.socket.close(linger=0)
        self._context.destroy(linger=0)

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.socket.send(codec.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        """One multipart message of any bytes."""
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The next message of a client."""
        assert self.socket.poll(round(timeout_s * 1000)), f"no message from {self.endpoint} within {timeout_s:g} s"
        message: m.SchedulerToClient = codec.scheduler_to_client.decode(self.socket.recv())
        return message

    def receive_until(self, wanted: Callable[[Any], bool], timeout_s: float = ANSWER_S) -> list[Any]:
        """Messages up to the first that is wanted, that one included."""
        deadline = time.monotonic() + timeout_s
        messages = []
        while True:
            messages.append(self.receive(max(0.0, deadline - time.monotonic())))
            if wanted(messages[-1]):
                return messages


def submit(request_id: str, token_ids: list[int] | bytes = b"\1\0\0\0", **sampling: Any) -> m.Submit:
    """A Submit with whatever is asked, unchecked; good unless told otherwise."""
    data = token_ids if isinstance(token_ids, bytes) else arrays.pack(token_ids)
    return m.Submit(request_id, data, m.SamplingParams(**{"max_tokens": 2, "ignore_eos": True, **sampling}))
