"""A worker waits between two steps as long as it was told, and no longer than until it is told otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.config import EngineConfig
from protocol.runtime import Endpoints
from worker.runner import ModelRunner
from worker.server import Worker

DEADLINE_MS = 20_000
ENDLESS = m.Rest(1_000_000_000)
"""Longer than a scheduler would say: a test that waits for its end fails."""


class Instant:
    """A runner whose steps take no time; `ran`: the plans, in order."""

    ready_fd = None
    lends_cores = True
    device, dtype = torch.device("cpu"), torch.float32
    backend, selection = SimpleNamespace(name="none"), SimpleNamespace(reason="")
    cache = SimpleNamespace(num_blocks=9, memory_id="m")
    model_config = SimpleNamespace(fingerprint="f", cache_groups=())
    counters: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.ran: list[int] = []

    def start_epoch(self, epoch: int) -> None: ...

    def items(self) -> tuple[int, int]:
        return 0, 0

    def flush(self, deliver: Any) -> None: ...

    def close(self) -> None: ...

    def submit(self, plan: m.SchedulerOutput, deliver: Any) -> None:
        self.ran.append(plan.step)
        deliver(m.ModelRunnerOutput(plan.epoch, plan.step, b"", plan.digest, pack([1, 2, 3, 4, 5])))


class Scheduler:
    """The other end of a worker's socket; the worker runs in a thread."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        address = f"ipc://{folder}/w"
        self.socket.bind(address)
        endpoints = cast(Endpoints, SimpleNamespace(worker=address))
        self.runner = Instant()
        runner = cast(ModelRunner, self.runner)
        self.worker = Worker(EngineConfig(max_model_len=64), endpoints, runner, "worker-0", 0, "i")
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        self.identity = b""
        self.hello = self.receive(m.Hello)
        self.send(m.Welcome(0, 0, 9))

    def send(self, *messages: m.SchedulerToWorker) -> None:
        for message in messages:
            self.socket.send_multipart([self.identity, codec.encode(message)])

    def plans(self, *steps: int) -> None:
        empty = (b"", (), b"", b"", (), 0, b"", b"", b"", b"", b"")
        self.send(*(m.SchedulerOutput(0, step, *empty) for step in steps))

    def receive(self, kind: type[Any]) -> Any:
        """The next message of this kind."""
        while self.socket.poll(DEADLINE_MS):
            identity, frame = self.socket.recv_multipart()
            message = codec.worker_to_scheduler.decode(frame)
            if isinstance(message, kind):
                self.identity = identity
                return message
        raise AssertionError(f"no {kind.__name__}")

    def is_silent(self, milliseconds: int) -> bool:
        """No result comes for so long."""
        while self.socket.poll(milliseconds):
            if isinstance(codec.worker_to_scheduler.decode(self.socket.recv_multipart()[1]), m.ModelRunnerOutput):
                return False
        return True

    def close(self) -> None:
        self.send(m.StopWorker("over"))
        self.thread.join(DEADLINE_MS / 1000)
        assert not self.thread.is_alive()
        self.socket.close(linger=0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    with zmq.Context() as context:
        scheduler = Scheduler(tmp_path, context)
        yield scheduler
        scheduler.close()


def rested_s(result: m.ModelRunnerOutput) -> float:
    timings = unpack(result.timings_us).tolist()
    assert timings[:5] == [1, 2, 3, 4, 5]
    return sum(timings[5:]) / 1e6


def test_without_a_rest_nothing_is_said_of_it(scheduler: Scheduler) -> None:
    assert scheduler.hello.lends_cores
    scheduler.plans(0, 1)
    assert [len(unpack(scheduler.receive(m.ModelRunnerOutput).timings_us)) for _ in range(2)] == [5, 5]


def test_it_waits_between_two_steps_and_says_how_long(scheduler: Scheduler) -> None:
    scheduler.send(m.Rest(30_000))
    scheduler.plans(0, 1, 2)
    results = [scheduler.receive(m.ModelRunnerOutput) for _ in range(3)]
    assert [result.step for result in results] == [0, 1, 2]
    assert rested_s(results[0]) == 0.0, "nothing had run before"
    for result in results[1:]:
        assert 0.02 < rested_s(result) < 10.0


def test_a_rest_ends_when_it_is_told_so_and_the_plans_keep_their_order(scheduler: Scheduler) -> None:
    scheduler.plans(0)
    scheduler.receive(m.ModelRunnerOutput)
    scheduler.send(ENDLESS)
    scheduler.plans(1, 2, 3)
    assert scheduler.is_silent(50)
    scheduler.send(m.Rest(0))
    results = [scheduler.receive(m.ModelRunnerOutput) for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3] == scheduler.runner.ran[1:]
    assert rested_s(results[0]) > 0.03
    assert [rested_s(result) for result in results[1:]] == [0.0, 0.0]


def test_a_new_epoch_has_no_rest(scheduler: Scheduler) -> None:
    scheduler.send(ENDLESS, m.Welcome(0, 0, 9))
    scheduler.plans(0, 1)
    assert [scheduler.receive(m.ModelRunnerOutput).step for _ in range(2)] == [0, 1]


def test_a_worker_that_rests_can_be_stopped(scheduler: Scheduler) -> None:
    """By the fixture: its thread ends."""
    scheduler.plans(0)
    scheduler.receive(m.ModelRunnerOutput)
    scheduler.send(ENDLESS)
    scheduler.plans(1)
    assert scheduler.is_silent(20)
