"""Having a worker killed: the scheduler passes the word on, and the supervisor, who alone owns processes, signals it.

The control plane is a socket in a folder that only this user can enter. What is named is an incarnation, not a pid.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from protocol import codec
from protocol.messages import KillWorker
from protocol.runtime import RuntimeFolderError, read_endpoints
from protocol.sockets import connect_dealer, fresh_identity

_LINGER_MS = 1000


def ask_to_kill(runtime: Path, worker_id: str, incarnation: str) -> bool:
    """Send the word; returns at once. False: there is no scheduler to send it to."""
    try:
        endpoint = read_endpoints(runtime).control
    except RuntimeFolderError:
        return False
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = connect_dealer(context, endpoint, fresh_identity("gateway"))
    try:
        socket.send(codec.encode(KillWorker(worker_id, incarnation, "kill -9 from the live page")), zmq.DONTWAIT)
    except zmq.Again:
        return False
    finally:
        socket.close(linger=_LINGER_MS)
    return True
