"""Signs of life from a thread and socket of their own, so that no step, however long, can hold them up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from protocol import codec
from protocol.messages import Heartbeat
from protocol.sockets import connect_dealer, fresh_identity


class HeartbeatThread:
    """Sends a Heartbeat every `interval_s` until stopped. `state` may be changed at any time.

    items: how many items of work were computed so far, and on borrowed cores.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        worker_id: str,
        incarnation: str,
        interval_s: float,
        items: Callable[[], tuple[int, int]],
    ):
        self._items = items
        self.state = "starting"
        self._stop = threading.Event()
        self._arguments = (context, endpoint, worker_id, incarnation, interval_s)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context, endpoint, worker_id, incarnation, interval_s = self._arguments
        socket = connect_dealer(context, endpoint, fresh_identity(f"{worker_id}-beat"))
        while not self._stop.wait(interval_s):
            try:
                beat = Heartbeat(worker_id, incarnation, self.state, *self._items())
                socket.send(codec.encode(beat), zmq.NOBLOCK)
            except zmq.Again:
                continue  # the scheduler is away; the next beat will do
        socket.close(linger=0)
