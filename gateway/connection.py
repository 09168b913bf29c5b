"""One HTTP/1.1 connection: uvicorn's, with the limits it lacks. Knows bytes and time, nothing of what is asked.

What a client may hold of this process without asking for anything is bounded: a head has a size and a deadline, and
whoever takes nothing of what is sent to it, or is no longer there, is found by the kernel. A client that leaves is told
to *every* request of its connection, also when it had sent the next one already.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What came in one read with the end of a head is not counted."""
HEAD_TIMEOUT_S = 30.0
"""From the connection, or from the first byte of a later request, until its head is complete."""
SEND_BUFFER_BYTES = 128 * 1024
"""The kernel keeps as much, some bookkeeping apart, of what a client has not read; else megabytes."""
MAX_PIPELINED = 8
"""Requests that may have come before the first is answered."""
UNREAD_TIMEOUT_S = 60
"""A client that takes nothing of what waits for it, or whose machine says nothing, is gone after this."""

_PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def prepare(listener: socket.socket) -> None:
    """Have the kernel bound what it keeps for a client, and find those that are gone without a word or do not read.
    Connections inherit it from their listener (Linux)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, UNREAD_TIMEOUT_S // 2)),
        ("TCP_KEEPINTVL", max(1, UNREAD_TIMEOUT_S // 6)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", UNREAD_TIMEOUT_S * 1000),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection(HttpToolsProtocol):
    """A protocol for `uvicorn.Config(http=…)`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._heads = 0
        """Complete ones."""
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: list[Any] = []
        """Requests without a complete answer; more than one only if the client did not wait for the first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)
        for cycle in self._running:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self._running.clear()

    def data_received(self, data: bytes) -> None:
        in_head, heads = self._in_head, self._heads
        super().data_received(data)
        if in_head and self._in_head and heads == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of a request may have at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heads += 1
        self._head_came()
        super().on_headers_complete()
        self._running = [cycle for cycle in self._running if not cycle.response_complete]
        self._running.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # or nobody would see that the client leaves

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(408, f"the head of the request was not complete within {HEAD_TIMEOUT_S:g} s")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of all errors."""
        self._refuse(400, "this is no valid HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside the application, unless an answer is under way, and hang up."""
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._running):
            body = ApiError(status, message).body
            head = (
                b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head % (status, _PHRASES.get(status, b"Bad Request"), len(body)) + body)
        self.transport.close()
