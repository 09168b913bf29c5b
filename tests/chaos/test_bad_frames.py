"""Anything but the protocol on every socket: it is counted and dropped, and the next request is served."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
from collections.abc import Iterator

import psutil
import pytest

from protocol import codec
from protocol import messages as m
from tests.chaos.raw import Peer, submit
from tests.chaos.test_bad_input import serves
from tests.integration.deployment import Deployment

PLANES = ("client", "worker", "control")
COUNTED_S = 10.0


@pytest.fixture
def unharmed(server: Deployment) -> Iterator[Deployment]:
    """The deployment; afterwards all its processes are the same and a request is served."""
    pids = server.pids
    yield server
    with Peer(server.endpoints["client"]) as peer:
        serves(peer)
    assert server.pids == pids


def junk() -> list[tuple[bytes, ...]]:
    """Multipart messages that no plane knows."""
    source = random.Random(7)
    lengths = (1, 2, 3, 7, 64, 1000, 100_000)
    bombs = (b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc9\xff\xff\xff\xff\x01", b"\xdb\xff\xff\xff\xff")
    return [
        *((source.randbytes(length),) for length in lengths),
        *((bytes([m.PROTOCOL_VERSION]) + source.randbytes(length),) for length in lengths),
        *((bytes([m.PROTOCOL_VERSION]) + bomb,) for bomb in bombs),  # huge arrays, deep nesting, huge extension, string
        (b"",),
        (pickle.dumps({"os.system": "true"}),),
        (bytes([m.PROTOCOL_VERSION + 1]) + codec.encode(m.Describe())[1:],),
        (codec.encode(m.Describe())[:-1],),
        (codec.encode(m.Describe()) + b"\0",),
        (codec.encode(m.StopWorker("from a stranger")),),
        (codec.encode(m.Accepted("x", 1, 1)),),
        (codec.encode(m.GetStatus()), codec.encode(m.GetStatus())),
        (b"", codec.encode(m.GetStatus())),
        (b"a", b"b", b"c", b"d"),
    ]


WRONG_PLANE: dict[str, list[object]] = {
    "client": [m.Shutdown(), m.WorkerExited("worker-0", "", ""), m.Heartbeat("worker-0", "", "")],
    "worker": [m.Shutdown(), submit("x"), m.Abort("x"), m.Watch()],
    "control": [submit("x"), m.Heartbeat("worker-0", "", ""), m.PlanRefused(0, 0, "digest")],
}


@pytest.mark.parametrize("plane", PLANES)
def test_junk_is_counted_and_dropped(unharmed: Deployment, plane: str) -> None:
    before = unharmed.status().dropped_frames
    with Peer(unharmed.endpoints[plane]) as peer:
        sent = junk() + [(codec.encode(message),) for message in WRONG_PLANE[plane]]  # type: ignore[arg-type]
        for frames in sent:
            peer.send_frames(*frames)
        unharmed.wait_until(
            lambda: unharmed.status().dropped_frames == before + len(sent), COUNTED_S, f"{len(sent)} frames counted"
        )


def test_results_of_a_stranger_change_nothing_and_are_counted(unharmed: Deployment) -> None:
    """Well-formed worker messages from someone who never said hello."""
    before = unharmed.status()
    strange = [
        m.ModelRunnerOutput(0, 0, b"\1\0\0\0", 0, b""),
        m.PlanRefused(0, 0, "digest"),
        m.ModelRunnerOutput(2**60, 2**60, b"\1", 2**64 - 1, b"x"),
    ]
    with Peer(unharmed.endpoints["worker"]) as peer:
        peer.send(*strange, m.Heartbeat("worker-0", "not its incarnation", "ready"))
        peer.send_frames(b"junk")  # counted by another part of the scheduler, into the same sum
        expected = before.dropped_frames + len(strange) + 1
        unharmed.wait_until(lambda: unharmed.status().dropped_frames == expected, COUNTED_S, "counted")
    assert unharmed.status().workers == before.workers


def test_worker_of_another_model_is_refused_with_both_values(unharmed: Deployment) -> None:
    before = unharmed.status().workers
    hello = m.Hello(
        *("stranger", "0" * 16, 0, 0, 1, os.getpid(), "f" * 16, 16, (), 100, 8192, 16, "x", "cpu", "float32", "cpu", "")
    )
    with Peer(unharmed.endpoints["worker"]) as peer:
        peer.send(hello)
        assert peer.socket.poll(10_000)
        refused = codec.scheduler_to_worker.decode(peer.socket.recv())
        assert isinstance(refused, m.Refused)
        assert "model fingerprint of stranger is ffffffffffffffff, the scheduler has " in refused.reason
    assert unharmed.status().workers == before


@pytest.mark.parametrize("plane", PLANES)
def test_bytes_that_are_no_zeromq_do_no_harm(unharmed: Deployment, plane: str) -> None:
    path = unharmed.endpoints[plane].removeprefix("ipc://")
    for data in (b"GET / HTTP/1.1\r\n\r\n", random.Random(1).randbytes(10_000), b"\xff" * 10, b""):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            try:
                connection.sendall(data)
            except BrokenPipeError:
                continue  # it has hung up already
    assert unharmed.status().requests == 0


@pytest.mark.parametrize("plane", PLANES)
def test_header_of_a_gigabyte_ends_the_connection_and_takes_no_memory(unharmed: Deployment, plane: str) -> None:
    """A good ZMTP 3.0 handshake, then a frame that claims 1 GB."""
    scheduler = psutil.Process(unharmed.pids["scheduler"])
    before = scheduler.memory_info().rss
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b"giant"))
    )
    body = b"\x05READY" + properties
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(unharmed.endpoints[plane].removeprefix("ipc://"))
        connection.sendall(greeting + bytes([4, len(body)]) + body)
        answer = b""
        while b"READY" not in answer:
            answer += connection.recv(4096)
        connection.sendall(b"\x02" + struct.pack(">Q", 2**30) + b"x" * 1000)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass  # hung up on: that is what is asked for; a timeout would fail the test
    assert scheduler.memory_info().rss < before + 50e6
