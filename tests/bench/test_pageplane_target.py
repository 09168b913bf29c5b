"""Pageplane is measured over its real client plane; here a scripted scheduler speaks for it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from bench.load import closed_loop
from bench.pageplane_target import PageplaneTarget
from bench.target import TargetError
from bench.workload import RandomWorkload
from protocol import arrays, codec
from protocol import messages as m
from protocol.sockets import bind_router

LOAD = RandomWorkload(num_prompts=3, input_len=4, output_len=5)
Script = Callable[[int, m.Submit], list[m.SchedulerToClient]]


def tokens(handle: int, first: int, count: int) -> m.TokenBatch:
    indices = list(range(first, first + count))
    return m.TokenBatch(0, arrays.pack([handle] * count), arrays.pack(indices), arrays.pack(indices))


def five_tokens(handle: int, submit: m.Submit) -> list[m.SchedulerToClient]:
    usage = m.Usage(prompt_tokens=4, completion_tokens=5)
    return [
        m.Accepted(submit.request_id, handle, 4),
        tokens(handle, 0, 1),
        tokens(handle, 1, 4),
        m.Finished(handle, "length", usage),
    ]


class ScriptedScheduler:
    """Answers each Submit with what `script(handle, submit)` says, from a thread of its own."""

    def __init__(self, folder: Path, script: Script):
        self.submits: list[m.Submit] = []
        self._script = script
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self.endpoint = bind_router(self._context, f"ipc://{folder}/client.sock")
        self._stopper = self._context.socket(zmq.PAIR)
        self._stopper.bind("inproc://stop")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        stopped = self._context.socket(zmq.PAIR)
        stopped.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(stopped, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            client, frame = self._socket.recv_multipart()
            for answer in self._answers(codec.client_to_scheduler.decode(frame)):
                self._socket.send_multipart([client, codec.encode(answer)])
        stopped.close(linger=0)

    def _answers(self, message: m.ClientToScheduler) -> list[m.SchedulerToClient]:
        match message:
            case m.Describe():
                return [m.ServerInfo(str(self._folder), "m", 49152, 2048, (2,), "fingerprint")]
            case m.Submit():
                self.submits.append(message)
                return self._script(len(self.submits), message)
        return []

    def close(self) -> None:
        self._stopper.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def serve() -> Iterator[Callable[[Script], ScriptedScheduler]]:
    started = []

    def start(script: Script) -> ScriptedScheduler:
        started.append(ScriptedScheduler(Path(folder), script))
        return started[-1]

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for a socket's path
        yield start
        for scheduler in started:
            scheduler.close()


async def measure(endpoint: str):
    target = PageplaneTarget("pageplane", endpoint)
    await target.open()
    try:
        return await closed_loop(target, LOAD.requests(1), 2, timeout_s=30)
    finally:
        await target.close()


def test_tokens_are_counted_and_the_request_is_what_the_workload_says(serve):
    scheduler = serve(five_tokens)
    records = asyncio.run(measure(scheduler.endpoint))
    assert [(record.num_tokens, record.failure) for record in records] == [(5, None)] * 3
    prompts = {tuple(arrays.unpack(submit.token_ids).tolist()) for submit in scheduler.submits}
    assert prompts == {request.prompt_token_ids for request in LOAD.requests(1)}
    sampling = scheduler.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (5, 0.0, True)


def test_rejected_failed_and_cut_requests_are_failures_with_their_reason(serve):
    def script(handle: int, submit: m.Submit) -> list[m.SchedulerToClient]:
        if handle == 1:
            return [m.Rejected(submit.request_id, "too_long", "prompt of 4 tokens")]
        reason: m.FinishReason = "error" if handle == 2 else "kv_capacity"
        usage = m.Usage(prompt_tokens=4, completion_tokens=1)
        return [
            m.Accepted(submit.request_id, handle, 4),
            tokens(handle, 0, 1),
            m.Finished(handle, reason, usage, "three worker deaths"),
        ]

    records = asyncio.run(measure(serve(script).endpoint))
    failures = sorted(str(record.failure) for record in records)
    assert ["three worker deaths" in failures[0], "too_long" in failures[1]] == [True, True]
    assert failures[2] == "ended with reason 'kv_capacity' instead of 'length'"


def test_without_a_server_opening_fails_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "none"))
    with pytest.raises(TargetError, match="ours: no running server"):
        asyncio.run(PageplaneTarget("ours").open())
