"""Clients vanish in every state, or do not read: nothing of theirs stays, nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway import connection
from protocol import messages as m
from tests.chaos.raw import Peer, submit
from tests.client.scripted_server import ScriptedServer
from tests.gateway.conftest import MAX_NUM_SEQS
from tests.gateway.in_process import ask, serve
from tests.gateway.wire import CHAT, SOON_S, TEXT, Answer, connect, mixed_bodies, post_all, read_all, request
from tests.integration.deployment import Deployment

CLIENTS = 50
ROWS = 2 * MAX_NUM_SEQS


def running(server: Deployment) -> int:
    return sum(replica.running for replica in server.status().replicas)


@contextmanager
def fifty(url: str, **body: Any) -> Iterator[list[socket.socket]]:
    """Connections of 50 clients that have asked, every other one for a stream; gone at the end, without a word."""
    clients = []
    for i in range(CLIENTS):
        client = connect(url)
        client.sendall(request(TEXT, {"prompt": f"client {i}", "ignore_eos": True, "stream": i % 2 == 0, **body}))
        clients.append(client)
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def test_while_they_wait_in_the_queue(server: Deployment, url: str) -> None:
    """The rows are all taken by someone else, who must keep them."""
    with Peer(server.endpoints["client"]) as stays:
        stays.send(*(submit(f"stays-{i}", [i + 1, 2, 3], max_tokens=4000) for i in range(ROWS)))
        server.wait_until(lambda: running(server) == ROWS, SOON_S, "all rows taken")
        with fifty(url, max_tokens=100):
            server.wait_until(lambda: server.status().waiting == CLIENTS, SOON_S, "all wait")
        server.wait_until(lambda: server.status().waiting == 0, SOON_S, "nobody waits")
        assert running(server) == ROWS
    server.wait_idle(SOON_S)


def test_while_their_prompts_are_computed(server: Deployment, url: str) -> None:
    """A prompt of 3,000 tokens takes several steps."""
    with fifty(url, prompt="long " * 600, max_tokens=1000):
        server.wait_until(lambda: running(server) > 0, SOON_S, "some are at it")
    server.wait_idle(SOON_S)


def test_while_their_answers_are_generated(server: Deployment, url: str) -> None:
    with fifty(url, max_tokens=4000):
        server.wait_until(lambda: running(server) == ROWS, SOON_S, "all rows are theirs")
    server.wait_idle(SOON_S)


def test_while_they_are_being_streamed_to(server: Deployment, url: str) -> None:
    with fifty(url, max_tokens=4000, stream=True) as clients:
        begun = 0
        while begun < 10:
            for client in clients:
                client.setblocking(False)
                try:
                    begun += b"data: " in client.recv(4096)
                except BlockingIOError:
                    continue
    server.wait_idle(SOON_S)


def test_leaving_is_told_to_the_scheduler_before_another_token(tmp_path: Path) -> None:
    """Of a scheduler that says no more, so the end can't have been noticed by a failed write. Every way to ask."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (path, {**body, "stream": stream, "max_tokens": 8, "n": n})
        for path, body in ((TEXT, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]}))
        for stream in (False, True)
        for n in (1, 2)
    ]

    def one_token(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server.accept(identity, message)
            if message.sampling.max_tokens == 8:
                server.tokens(message.request_id, 0, [65])
        return isinstance(message, m.Submit)

    with serve(tmp_path, one_token) as (url, server):
        expected = 0
        for path, body in bodies:
            for silent in (False, True):
                expected += body["n"]
                with connect(url) as client:
                    client.sendall(request(path, {**body, "max_tokens": 9 if silent else 8}))
                    server.wait_for(m.Submit, expected)
                    if body["stream"] and not silent:
                        while b"data: " not in client.recv(4096):
                            pass
                server.wait_for(m.Abort, expected)
        submitted = [message.request_id for message in server.received if isinstance(message, m.Submit)]
        assert {a.request_id for a in server.received if isinstance(a, m.Abort)} == set(submitted)


def test_a_client_that_sent_its_next_request_already_is_missed_as_well(tmp_path: Path) -> None:
    def never(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server.accept(identity, message)
        return isinstance(message, m.Submit)

    with serve(tmp_path, never) as (url, server):
        with connect(url) as client:
            client.sendall(2 * request(TEXT, {"prompt": "abc"}))
            server.wait_for(m.Submit)
        server.wait_for(m.Abort)
        assert len(server.wait_for(m.Submit)) == 1, "the second is not begun for nobody"


def test_an_answer_that_is_complete_is_not_aborted(tmp_path: Path) -> None:
    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        for stream in (False, True):
            for n in (1, 3):
                answer = await client.post(TEXT, json={"prompt": "abc", "max_tokens": 2, "n": n, "stream": stream})
                assert answer.status_code == 200
        assert (await client.post(TEXT, json={"prompt": "abc", "max_tokens": 2, "stop": "b"})).status_code == 200
        assert len([message for message in server.received if isinstance(message, m.Abort)]) <= 1

    ask(tmp_path, None, question)


def test_a_client_that_does_not_read_holds_up_nobody_costs_little_and_loses_nothing(
    server: Deployment, url: str
) -> None:
    """What it cannot take meanwhile comes merged into fewer events."""
    tokens, choices = 600, 4
    body: dict[str, Any] = {"prompt": "slow", "max_tokens": tokens, "n": choices, "temperature": 1, "seed": 3}
    body |= {"ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    probes = mixed_bodies(4, 40)
    golden = asyncio.run(post_all(url, probes))
    gateway = psutil.Process(server.pids["gateway"])
    with connect(url, receive_buffer=4096) as slow:
        before = gateway.memory_info().rss
        slow.sendall(request(TEXT, body).replace(b"\r\nHost", b"\r\nConnection: close\r\nHost"))
        server.wait_until(lambda: running(server) == choices, SOON_S, "all choices run")
        began = time.monotonic()
        assert [a.outcome for a in asyncio.run(post_all(url, probes))] == [a.outcome for a in golden]
        assert time.monotonic() - began < 2 * SOON_S
        server.wait_until(lambda: server.status().requests == 0, 60, "all is generated, little of it was read")
        assert gateway.memory_info().rss - before < 16 * 2**20
        events = [
            json.loads(line.removeprefix(b"data: "))
            for line in read_all(slow).split(b"\n")
            if line.startswith(b"data: {")
        ]
    answer = Answer(body, 200, events=events)
    by_choice = [[c for c in answer.choices if c["index"] == i] for i in range(choices)]
    assert answer.usage["completion_tokens"] == tokens * choices
    assert len(answer.choices) < tokens * choices * 0.8, "merged"
    (whole,) = asyncio.run(post_all(url, [{**body, "stream": False, "stream_options": None}]))
    for i, parts in enumerate(by_choice):
        assert [token for part in parts for token in part["token_ids"]] == whole.choices[i]["token_ids"]
        assert "".join(part["text"] for part in parts) == whole.choices[i]["text"]


def test_a_client_that_reads_nothing_for_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request runs on, and its connection stands: only the kernel can tell that nothing is taken."""
    monkeypatch.setattr(connection, "UNREAD_TIMEOUT_S", 1)

    def says_much(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server.accept(identity, message)
            for first in range(0, 20_000, 10):
                server.tokens(message.request_id, first, [97] * 10)
        return isinstance(message, m.Submit | m.Attach)

    with serve(tmp_path, says_much) as (url, server), connect(url, receive_buffer=4096) as client:
        body = {"prompt": "abc", "max_tokens": 30_000, "stream": True, "return_token_ids": True, "n": 4}
        client.sendall(request(TEXT, body))
        server.wait_for(m.Abort, 4, timeout_s=30)


@pytest.mark.parametrize("count", [1, 3])
def test_a_choice_that_nobody_takes_is_kept_as_tokens_not_as_text(tmp_path: Path, count: int) -> None:
    """Before a client that takes nothing, at most a few deltas are made ahead; the rest waits as ids."""
    from gateway.generation import Job, Order
    from gateway.state import Gateway
    from protocol.config import EngineConfig
    from protocol.runtime import Endpoints, publish
    from tests.tiny_model import tiny_model

    def says_much(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server.accept(identity, message)
            server.tokens(message.request_id, 0, [97] * 500)
            server.finish(message.request_id, 500, "length")
        return isinstance(message, m.Submit)

    async def main() -> list[int]:
        config = EngineConfig(model=str(tiny_model()), model_name="tiny")
        async with Gateway(config, tmp_path) as gateway:
            job = Job(gateway, Order("r", [[1]], m.SamplingParams(max_tokens=500), "prompt", n=count))
            try:
                await job.start()
                first = await job.next()
                assert first is not None
                client = await gateway.upstream.client()
                while client._requests:  # until all has come and nothing was taken
                    await asyncio.sleep(0)
                sizes = [len(first.token_ids)]
                while (delta := await job.next()) is not None:
                    sizes.append(len(delta.token_ids))
                return sizes
            finally:
                await job.close()

    with ScriptedServer(f"ipc://{tmp_path}/client.sock", tiny_model(), says_much) as server:
        publish(tmp_path, Endpoints(client=server.endpoint, worker="", control=""))
        sizes = asyncio.run(main())
    assert sum(sizes) == 500 * count
    assert len(sizes) <= 6 * count
