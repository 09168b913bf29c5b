"""A gateway process before a simulated model: 1,000 streams at once, each checked against its own prompt and seed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from protocol import arrays
from protocol import messages as m
from protocol.config import EngineConfig
from protocol.runtime import Endpoints, publish
from tests.client.scripted_server import ScriptedServer
from tests.gateway.wire import Answer, post_all
from tests.integration.deployment import ROOT
from tests.tiny_model import tiny_model

STREAMS = 1000
LONGEST = 20


def length(seed: int) -> int:
    return LONGEST - seed % 17


def text(prompt: str, seed: int) -> str:
    """What the simulated model answers: each token depends on prompt, seed and position. Printable, a token a byte."""
    return "".join(
        chr(33 + (sum(prompt.encode()) * 31 + seed * 7 + i * (1 + seed % 5)) % 94) for i in range(length(seed))
    )


class SimulatedModel:
    """Waits for all requests, then gives each of them a token a step: the next one when all clients have the last.

    A `Handler` of the scheduler and an `OnEvent` of the clients.
    """

    def __init__(self, count: int):
        self._count = count
        self._outputs: list[tuple[str, bytes]] = []
        self._step = 0
        self._asked = 0
        self._sent = 0
        self._arrived = 0
        self.scheduler: ScriptedServer | None = None

    def __call__(self, server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        server.accept(identity, message)
        prompt = arrays.unpack(message.token_ids).astype("uint8").tobytes().decode()
        self._outputs.append((message.request_id, text(prompt, message.sampling.seed or 0).encode()))
        if len(self._outputs) == self._count:
            self.scheduler = server
            self._next_step()
        return True

    def _next_step(self) -> None:
        server = self.scheduler
        assert server is not None
        step = self._step
        alive = [(name, output) for name, output in self._outputs if step < len(output)]
        self._sent += len(alive)
        self._step += 1  # before anybody can have read a token of this step
        identity = server.handles[alive[0][0]][0]
        handles = [server.handles[name][1] for name, _ in alive]
        tokens = [output[step] for _, output in alive]
        server.send(identity, m.TokenBatch(step, *map(arrays.pack, (handles, [step] * len(alive), tokens))))
        for name, output in alive:
            if step == len(output) - 1:
                server.finish(name, len(output), "length")

    def read(self, answer: Answer) -> None:
        """A client has read an event."""
        if answer.status != 200 or answer.events[-1] == "[DONE]":
            return
        self._arrived += sum(len(choice["token_ids"]) for choice in answer.events[-1]["choices"])
        if self._arrived == self._sent and self._asked < self._step < LONGEST:  # once: events without a token follow
            assert self.scheduler is not None
            self._asked = self._step
            self.scheduler.do(self._next_step)


@contextmanager
def gateway(runtime: Path, scheduler: ScriptedServer) -> Iterator[tuple[str, psutil.Process]]:
    """`python -m gateway` as the supervisor starts it."""
    publish(runtime, Endpoints(client=scheduler.endpoint, worker="", control=""))
    EngineConfig(model=str(tiny_model()), model_name="tiny", log_level="warning").save(runtime / "config.json")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        command = [sys.executable, "-m", "gateway", "--config", str(runtime / "config.json"), "--runtime", str(runtime)]
        command += ["--listener-fd", str(listener.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=(listener.fileno(),),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(10)


def test_a_thousand_streams_none_lost_or_mixed_and_memory_bounded(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"stream {i}", "seed": i, "max_tokens": LONGEST, "stream": True, "return_token_ids": True}
        for i in range(STREAMS)
    ]

    model = SimulatedModel(STREAMS)
    with (
        ScriptedServer(f"ipc://{tmp_path}/client.sock", tiny_model(), model) as scheduler,
        gateway(tmp_path, scheduler) as (url, process),
    ):
        asyncio.run(post_all(url, [{**bodies[0], "max_tokens": 0}]))  # refused; by then it is up
        before = process.memory_info().rss
        answers = asyncio.run(post_all(url, bodies, model.read))
        growth = process.memory_info().rss - before
    assert [answer.status for answer in answers] == [200] * STREAMS
    for i, answer in enumerate(answers):
        assert answer.text == text(f"stream {i}", i)
        assert answer.token_ids == list(answer.text.encode())
        assert (answer.finish_reason, answer.events[-1], answer.broke_off) == ("length", "[DONE]", False)
        assert len(answer.choices) >= len(answer.token_ids), "one event for each token: all streams were under way"
    assert len({answer.headers["x-request-id"] for answer in answers}) == STREAMS
    assert growth < 100 * 2**20, "100 kB a stream"
