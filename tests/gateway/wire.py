"""HTTP by hand: what a test must control that no library lets it: when to leave, when to read, what to send at all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SOON_S = 5.0


def request(path: str, body: dict[str, Any], host: str = "127.0.0.1") -> bytes:
    """A whole POST, as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A blocking socket; a small receive buffer lets the server feel at once that nobody reads."""
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.settimeout(30)
    plain.connect(address_of(url))
    return plain


def read_all(plain: socket.socket) -> bytes:
    """Until the server hangs up."""
    found = b""
    while piece := plain.recv(1 << 16):
        found += piece
    return found


@dataclass
class Answer:
    """One streamed or whole answer, while and after it comes."""

    body: dict[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    """Parsed data of each event, "[DONE]" included; of an answer that is no stream its JSON alone."""
    broke_off: bool = False
    """The connection ended before the answer did."""

    @property
    def choices(self) -> list[Any]:
        return [choice for event in self.events if isinstance(event, dict) for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice["token_ids"]]

    @property
    def finish_reason(self) -> str | None:
        return next((c["finish_reason"] for c in reversed(self.choices) if c["finish_reason"]), None)

    @property
    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = next(e["usage"] for e in self.events if isinstance(e, dict) and e.get("usage"))
        return found

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that ended it."""
        last = self.events[-1] if self.events else None
        return last["error"] if isinstance(last, dict) and "error" in last else None

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must not depend on luck."""
        usage = self.usage
        tokens = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        return self.status, self.text, tuple(self.token_ids), self.finish_reason, tokens, self.events[-1]


OnEvent = Callable[[Answer], None]


async def post(url: str, path: str, body: dict[str, Any], on_event: OnEvent = lambda answer: None) -> Answer:
    """The answer to one request over a connection of its own; `on_event` is called for every event, at once."""
    answer = Answer(body)
    host, port = address_of(url)
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(request(path, body))
        answer.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            answer.headers[name.lower()] = value.strip()
        if "content-length" in answer.headers:
            content = await reader.readexactly(int(answer.headers["content-length"]))
            answer.events.append(json.loads(content))
            on_event(answer)
            return answer
        while size := int(await reader.readline(), 16):
            piece = await reader.readexactly(size + 2)
            for event in piece.removesuffix(b"\r\n").decode().split("\n\n")[:-1]:
                data = event.removeprefix("data: ")
                answer.events.append(data if data == "[DONE]" else json.loads(data))
                on_event(answer)
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
        answer.broke_off = True
    finally:
        writer.close()
    return answer


async def post_all(
    url: str, bodies: Sequence[dict[str, Any]], on_event: OnEvent = lambda answer: None, path: str = TEXT
) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(post(url, path, body, on_event) for body in bodies)))


def mixed_bodies(count: int, max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Streams of distinct prompts; every other one is sampled, with a seed of its own."""
    return [
        {
            "prompt": f"{i}: " + "abcdefgh"[i % 8] * (20 + i % 7),
            "max_tokens": max_tokens,
            "temperature": i % 2,
            "top_p": 0.95,
            "seed": 1000 + i,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **more,
        }
        for i in range(count)
    ]


class Begun:
    """Calls `then` once, as soon as each of `count` streams has brought `tokens` tokens. An `OnEvent`."""

    def __init__(self, count: int, tokens: int, then: Callable[[], Any]):
        self._left = count
        self._tokens = tokens
        self._then = then
        self._seen: set[int] = set()
        self.called = False

    def __call__(self, answer: Answer) -> None:
        if id(answer) in self._seen or len(answer.token_ids) < self._tokens:
            return
        self._seen.add(id(answer))
        self._left -= 1
        if self._left == 0:
            self.called = True
            self._then()
