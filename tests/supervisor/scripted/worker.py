"""A worker that computes nothing: it says Hello and waits to be ended.

SCRIPT_<ID>, for example SCRIPT_WORKER_1, changes that: "exit" writes a line and exits with code 3 before Hello;
"freeze" never says Hello; "fenced" has the scheduler fence it; "deaf" ignores SIGTERM; "family" has a child of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import zmq

from protocol import codec
from protocol import messages as m
from protocol.lifeline import die_with_supervisor
from protocol.runtime import read_endpoints
from protocol.sockets import connect_dealer, fresh_identity


def main() -> None:
    die_with_supervisor()
    parser = argparse.ArgumentParser()
    for flag in ("--config", "--worker-id", "--incarnation"):
        parser.add_argument(flag)
    parser.add_argument("--runtime", type=Path)
    parser.add_argument("--replica", type=int)
    options = parser.parse_args()
    behaviour = os.environ.get("SCRIPT_" + options.worker_id.upper().replace("-", "_"), "")
    if behaviour == "exit":
        print("no memory for the KV cache", file=sys.stderr)
        sys.exit(3)
    if behaviour == "freeze":
        signal.pause()
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "family":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (options.runtime / "grandchild").write_text(str(child.pid))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_dealer(context, read_endpoints(options.runtime).worker, fresh_identity(options.worker_id))
    hello = m.Hello(
        worker_id=options.worker_id,
        incarnation=options.incarnation,
        replica=options.replica,
        rank=0,
        tp_size=1,
        pid=os.getpid(),
        model_fingerprint="0" * 16,
        block_size=16,
        groups=(),
        num_blocks=101,
        max_model_len=128,
        max_num_seqs=4,
        kv_memory_id=options.incarnation,
        device="fenced" if behaviour == "fenced" else "cpu",
        dtype="float32",
        attention_backend="cpu",
        backend_reason="scripted",
    )
    socket.send(codec.encode(hello))
    signal.pause()
    signal.pause()  # a handled signal may return from the first


if __name__ == "__main__":
    main()
