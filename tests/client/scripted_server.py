"""A server without a model: a real ROUTER in a thread that answers by script. Its default answer repeats the prompt."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from protocol import arrays, codec
from protocol import messages as m
from protocol.sockets import bind_router

Handler = Callable[["ScriptedServer", bytes, m.ClientToScheduler], bool]
"""Deals with a message (and returns True) or leaves it to the default (False)."""

STATUS = m.Status(
    uptime_s=61.0,
    waiting=1,
    requests=3,
    workers=(m.WorkerStatus("worker-0", "ready", 0, 1, 4242, "cpu", "float32", "cpu", "fastest here", 101, 16),),
    replicas=(m.ReplicaStatus(0, "ready", 1, 2, 60, 100, 30, 1000, 250, 12, 77, 4, 1, 0),),
    dropped_frames=0,
)


class ScriptedServer:
    """Start with `with`; `received` has every message, in order."""

    def __init__(self, endpoint: str, model_folder: Path, handler: Handler | None = None):
        self.endpoint = endpoint
        self.info = m.ServerInfo(str(model_folder), "scripted", 260, 128, (257,), "0" * 16)
        self.handler = handler
        self.received: list[m.ClientToScheduler] = []
        self._arrived = threading.Condition()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handle = 0
        self.handles: dict[str, tuple[bytes, int, int]] = {}
        """Per request id: the connection, the handle there, the number of prompt tokens."""

    def __enter__(self) -> ScriptedServer:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self.endpoint = bind_router(self._context, self.endpoint)
        self._bell_in = self._context.socket(zmq.PAIR)
        self._bell_in.bind("inproc://bell")
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.connect("inproc://bell")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.put(None)
        self._bell.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the server's thread, which alone may send."""
        self._todo.put(action)
        self._bell.send(b"")

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 10.0) -> list[m.ClientToScheduler]:
        """The messages of one kind, once there are `count` of them."""

        def found() -> list[m.ClientToScheduler]:
            return [message for message in self.received if isinstance(message, kind)]

        with self._arrived:
            assert self._arrived.wait_for(lambda: len(found()) >= count, timeout_s), (kind, self.received)
            return found()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell_in in ready:
                self._bell_in.recv()
                action = self._todo.get()
                if action is None:
                    return
                action()
            if self._socket in ready:
                identity, frame = self._socket.recv_multipart()
                message = codec.client_to_scheduler.decode(frame)
                if not (self.handler and self.handler(self, identity, message)):
                    self._default(identity, message)
                with self._arrived:
                    self.received.append(message)
                    self._arrived.notify_all()

    def _default(self, identity: bytes, message: m.ClientToScheduler) -> None:
        match message:
            case m.Describe():
                self.send(identity, self.info)
            case m.GetStatus():
                self.send(identity, STATUS)
            case m.Submit():
                self.accept(identity, message)
                prompt = arrays.unpack(message.token_ids).tolist()
                output = prompt[: message.sampling.max_tokens]
                self.tokens(message.request_id, 0, output)
                self.finish(message.request_id, len(output))
            case m.Abort() if message.request_id in self.handles:
                self.finish(message.request_id, 0, "abort")
            case m.Abort() | m.Attach():
                self.send(identity, m.Rejected(message.request_id, "unknown_request", "unknown request"))

    # What a script is made of. Call these from a handler, or through `do`.

    def send(self, identity: bytes, message: m.SchedulerToClient) -> None:
        with suppress(zmq.ZMQError):  # a client that has gone hears nothing
            self._socket.send_multipart([identity, codec.encode(message)])

    def accept(self, identity: bytes, submit: m.Submit) -> None:
        self._handle += 1
        prompt_tokens = len(submit.token_ids) // 4
        self.handles[submit.request_id] = (identity, self._handle, prompt_tokens)
        self.send(identity, m.Accepted(submit.request_id, self._handle, prompt_tokens))

    def tokens(self, request_id: str, first: int, tokens: list[int]) -> None:
        identity, handle, _ = self.handles[request_id]
        for index, token in enumerate(tokens, start=first):
            batch = m.TokenBatch(index, arrays.pack([handle]), arrays.pack([index]), arrays.pack([token]))
            self.send(identity, batch)

    def finish(self, request_id: str, count: int, reason: m.FinishReason = "stop", message: str = "") -> None:
        identity, handle, prompt_tokens = self.handles.pop(request_id)
        self.send(identity, m.Finished(handle, reason, m.Usage(prompt_tokens, count), message))
