"""Sockets: no loss is silent, nothing lingers, no identity returns, no port is guessed."""

from __future__ import annotations

import pickle
import socket as stdlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import codec
from protocol import messages as m
from protocol.sockets import BindError, bind_router, connect_dealer, fresh_identity

PATIENCE_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    start = time.monotonic()
    context.destroy()
    assert time.monotonic() - start < 2, "something lingers"


def receive(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(PATIENCE_MS), "nothing came"
    return socket.recv_multipart()


def test_a_message_to_a_peer_that_is_gone_is_an_error(context: zmq.Context, tmp_path: Path) -> None:
    router, endpoint = bind_router(context, f"ipc://{tmp_path}/s")
    dealer = connect_dealer(context, endpoint, b"worker-1")
    dealer.send(b"hello")
    assert receive(router) == [b"worker-1", b"hello"]
    router.send_multipart((b"worker-1", b"welcome"))
    assert receive(dealer) == [b"welcome"]
    dealer.close()
    deadline = time.monotonic() + PATIENCE_MS / 1000
    error = None
    while error is None and time.monotonic() < deadline:
        try:
            router.send_multipart((b"worker-1", b"plan"), zmq.NOBLOCK)
            router.poll(1)  # lets the socket notice
        except zmq.ZMQError as raised:
            error = raised
    assert error is not None and error.errno == zmq.EHOSTUNREACH


def test_a_message_to_a_stranger_is_an_error(context: zmq.Context, tmp_path: Path) -> None:
    router, _ = bind_router(context, f"ipc://{tmp_path}/s")
    with pytest.raises(zmq.ZMQError) as raised:
        router.send_multipart((b"nobody", b"plan"), zmq.NOBLOCK)
    assert raised.value.errno == zmq.EHOSTUNREACH


def test_twenty_restarts_under_fresh_identities_lose_no_message(context: zmq.Context, tmp_path: Path) -> None:
    router, endpoint = bind_router(context, f"ipc://{tmp_path}/s")
    for restart in range(20):
        identity = fresh_identity("worker-0")
        dealer = connect_dealer(context, endpoint, identity)
        dealer.send(b"hello %d" % restart)
        assert receive(router) == [identity, b"hello %d" % restart]
        for number in range(20):
            router.send_multipart((identity, b"plan %d" % number))
        assert [receive(dealer) for _ in range(20)] == [[b"plan %d" % number] for number in range(20)]
        dealer.close()


def test_no_identity_is_used_twice() -> None:
    identities = {fresh_identity("worker-0") for _ in range(1000)}
    assert len(identities) == 1000
    assert all(identity.startswith(b"worker-0-") and len(identity) < 256 for identity in identities)


def test_fifty_starts_lose_no_first_message(context: zmq.Context, tmp_path: Path) -> None:
    """Hello is sent right after connecting, also before the router is bound; work follows only the answer."""
    endpoints = [f"ipc://{tmp_path}/{start}" for start in range(50)]
    early = [connect_dealer(context, endpoint, b"early") for endpoint in endpoints]
    for dealer in early:
        dealer.send(b"hello")
    routers = [bind_router(context, endpoint)[0] for endpoint in endpoints]
    late = [connect_dealer(context, endpoint, b"late") for endpoint in endpoints]
    for dealer in late:
        dealer.send(b"hello")
    for router, *dealers in zip(routers, early, late, strict=True):
        assert sorted([receive(router), receive(router)]) == [[b"early", b"hello"], [b"late", b"hello"]]
        for identity in (b"early", b"late"):
            router.send_multipart((identity, b"welcome"))
        assert [receive(dealer) for dealer in dealers] == [[b"welcome"], [b"welcome"]]


def test_a_paused_reader_gets_all_in_order_or_the_sender_an_error(context: zmq.Context, tmp_path: Path) -> None:
    router, endpoint = bind_router(context, f"ipc://{tmp_path}/s")
    dealer = connect_dealer(context, endpoint, b"slow")
    dealer.send(b"hello")
    receive(router)
    sent = 0
    for number in range(20_000):
        try:
            router.send_multipart((b"slow", b"%d" % number), zmq.NOBLOCK)
        except zmq.Again:
            break
        sent += 1
    assert sent >= 4096
    assert [receive(dealer)[0] for _ in range(sent)] == [b"%d" % number for number in range(sent)]


def test_thirty_two_servers_find_ports_of_their_own(context: zmq.Context) -> None:
    for _ in range(20):
        bound = [bind_router(context, "tcp://127.0.0.1:0") for _ in range(32)]
        endpoints = {endpoint for _, endpoint in bound}
        assert len(endpoints) == 32 and not any(endpoint.endswith(":0") for endpoint in endpoints)
        for router, _ in bound:
            router.close()


def test_a_published_port_is_reachable(context: zmq.Context) -> None:
    router, endpoint = bind_router(context, "tcp://127.0.0.1:0")
    dealer = connect_dealer(context, endpoint, b"client")
    dealer.send(b"hello")
    assert receive(router) == [b"client", b"hello"]


def test_a_busy_port_is_named(context: zmq.Context) -> None:
    with stdlib.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BindError, match=f"cannot listen on {endpoint}"):
            bind_router(context, endpoint)


def test_a_path_where_another_listens_is_named(context: zmq.Context, tmp_path: Path) -> None:
    first, _ = bind_router(context, f"ipc://{tmp_path}/s")
    with pytest.raises(BindError, match="another process listens there"):
        bind_router(context, f"ipc://{tmp_path}/s")
    assert not first.closed


def test_a_stale_socket_file_is_taken_over(context: zmq.Context, tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = stdlib.socket(stdlib.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    assert path.exists()
    router, endpoint = bind_router(context, f"ipc://{path}")
    dealer = connect_dealer(context, endpoint, b"client")
    dealer.send(b"hello")
    assert receive(router) == [b"client", b"hello"]


def test_closing_does_not_wait_for_a_dead_peer(tmp_path: Path) -> None:
    context = zmq.Context()
    dealer = connect_dealer(context, f"ipc://{tmp_path}/nobody", b"client")
    for _ in range(100):
        dealer.send(b"hello")
    start = time.monotonic()
    context.destroy()
    assert time.monotonic() - start < 2


def test_junk_is_refused_and_the_next_message_understood(context: zmq.Context) -> None:
    """Bytes of a stranger on the port, a pickle, a frame over the limit: the socket lives on."""
    router, endpoint = bind_router(context, "tcp://127.0.0.1:0")
    host, port = endpoint.removeprefix("tcp://").split(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x02" + (1 << 30).to_bytes(8, "big")):
        with stdlib.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(junk)
    dealer = connect_dealer(context, endpoint, b"client")
    dealer.send(pickle.dumps({"a": 1}))
    dealer.send(codec.encode(m.Describe()))
    with pytest.raises(codec.ProtocolError):
        codec.client_to_scheduler.decode(receive(router)[1])
    assert codec.client_to_scheduler.decode(receive(router)[1]) == m.Describe()


def test_a_frame_over_the_limit_ends_only_its_senders_connection(context: zmq.Context) -> None:
    router, endpoint = bind_router(context, "tcp://127.0.0.1:0")
    large, small = (connect_dealer(context, endpoint, name) for name in (b"large", b"small"))
    large.send(bytes(codec.MAX_FRAME_BYTES + 1), copy=False)
    small.send(codec.encode(m.Describe()))
    assert receive(router)[0] == b"small"
