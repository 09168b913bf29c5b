"""ZeroMQ sockets as this project uses them: ROUTER binds, DEALER connects, nothing lingers, no loss is silent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import zmq

from protocol.codec import MAX_FRAME_BYTES


class BindError(RuntimeError):
    """An endpoint could not be bound; the message names it and why."""


def fresh_identity(name: str) -> bytes:
    """A routing id never used before: one per incarnation, so that no message meant for a predecessor arrives."""
    return f"{name}-{secrets.token_hex(8)}".encode()


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> tuple[zmq.Socket[bytes], str]:
    """A bound ROUTER and the endpoint as bound (tcp port 0 becomes the real one).

    MANDATORY: sending to a peer that is gone raises EHOSTUNREACH. LINGER 0: closing never waits.
    Raises BindError when the address is taken.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _common(socket)
    if endpoint.startswith("ipc://"):
        _remove_stale(Path(endpoint.removeprefix("ipc://")))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise BindError(f"cannot listen on {endpoint}: {error.strerror}") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return socket, bound.rstrip(b"\0").decode()


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    """A DEALER connected under `identity`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    _common(socket)
    socket.connect(endpoint)
    return socket


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, 4096)
    socket.setsockopt(zmq.RCVHWM, 4096)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on (a server killed with -9 leaves it)."""
    import socket as stdlib

    if not path.exists():
        return
    probe = stdlib.socket(stdlib.AF_UNIX, stdlib.SOCK_STREAM)
    try:
        probe.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    else:
        raise BindError(f"cannot listen on ipc://{path}: another process listens there")
    finally:
        probe.close()
