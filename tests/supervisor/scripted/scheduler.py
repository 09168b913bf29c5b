"""A scheduler with no policy: it reports each worker that says Hello as ready, and obeys Shutdown.

SCRIPT_SCHEDULER=die: writes a line and exits with code 4. =deaf: ignores Shutdown and SIGTERM.
Every WorkerExited is appended to `exits` in the runtime folder. A Hello with device "fenced" is fenced, once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import zmq

from protocol import codec
from protocol import messages as m
from protocol.lifeline import die_with_supervisor
from protocol.runtime import Endpoints, publish
from protocol.sockets import bind_router


def main() -> None:
    die_with_supervisor()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--runtime", type=Path)
    runtime: Path = parser.parse_args().runtime
    behaviour = os.environ.get("SCRIPT_SCHEDULER", "")
    if behaviour == "die":
        print("cannot listen on tcp://127.0.0.1:80: in use", file=sys.stderr)
        sys.exit(4)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = {}
    for name in ("client", "worker", "control"):
        sockets[name], _ = bind_router(context, f"ipc://{runtime / name}.sock")
    addresses = {name: f"ipc://{runtime / name}.sock" for name in sockets}
    publish(runtime, Endpoints(**addresses, pid=os.getpid()))
    watcher = b""
    ready: list[m.Hello] = []
    fenced = False
    poller = zmq.Poller()
    poller.register(sockets["worker"], zmq.POLLIN)
    poller.register(sockets["control"], zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            identity, frame = socket.recv_multipart()
            if socket is sockets["worker"]:
                hello = codec.worker_to_scheduler.decode(frame)
                assert isinstance(hello, m.Hello)
                ready.append(hello)
                if watcher:
                    sockets["control"].send_multipart([watcher, codec.encode(changed(hello))])
                if hello.device == "fenced" and not fenced:
                    fenced = True
                    kill = m.KillWorker(hello.worker_id, hello.incarnation, "diverged")
                    sockets["control"].send_multipart([watcher, codec.encode(kill)])
                continue
            message = codec.supervisor_to_scheduler.decode(frame)
            if isinstance(message, m.Watch):
                watcher = identity
                for hello in ready:
                    socket.send_multipart([watcher, codec.encode(changed(hello))])
            elif isinstance(message, m.WorkerExited):
                with open(runtime / "exits", "a") as file:
                    file.write(f"{message.worker_id} {message.incarnation} {message.reason}\n")
            elif isinstance(message, m.Shutdown) and behaviour != "deaf":
                context.destroy(linger=0)
                return


def changed(hello: m.Hello) -> m.WorkerChanged:
    return m.WorkerChanged(
        m.WorkerStatus(
            worker_id=hello.worker_id,
            state="ready",
            replica=hello.replica,
            epoch=1,
            pid=hello.pid,
            device=hello.device,
            dtype=hello.dtype,
            attention_backend=hello.attention_backend,
            backend_reason=hello.backend_reason,
            num_blocks=hello.num_blocks,
            block_size=hello.block_size,
        )
    )


if __name__ == "__main__":
    main()
