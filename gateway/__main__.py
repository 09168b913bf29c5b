"""`python -m gateway --config FILE --runtime DIR`: started by the supervisor, which hands it a listening socket."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn
import uvloop

from gateway.app import build
from gateway.connection import Connection, prepare
from protocol import logs
from protocol.config import ConfigError, EngineConfig
from protocol.lifeline import die_with_supervisor

KEEP_ALIVE_S = 75
"""Idle connections are closed after this."""
MAX_OPEN_FILES = 65536
GRACE_S = 1
"""What running answers get when we are told to stop; the scheduler has ended them by then."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="The HTTP process.")
    parser.add_argument("--config", type=Path, required=True, help="configuration written by the supervisor")
    parser.add_argument("--runtime", type=Path, required=True, help="runtime folder with endpoints.json")
    parser.add_argument("--listener-fd", type=int, help="a listening socket that was inherited (default: open one)")
    parser.add_argument("--beat-fd", type=int, help="a pipe on which to show that we live (default: none)")
    arguments = parser.parse_args()
    die_with_supervisor()
    try:
        config = EngineConfig.load(arguments.config)
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    log = logs.set_up("gateway", config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of clients: each gets an answer
    try:
        if arguments.listener_fd is not None:
            listener = socket.socket(fileno=arguments.listener_fd)
        else:
            listener = socket.create_server((config.host, config.port), reuse_port=False)
    except OSError as error:
        log.error("cannot listen on %s, port %d: %s", config.host, config.port, error.strerror)
        return 1
    prepare(listener)
    _allow_many_connections()
    server = uvicorn.Server(
        uvicorn.Config(
            build(config, arguments.runtime),
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    gc.collect()
    gc.freeze()  # what is there by now stays: the collector need not look through it again while streams wait

    async def serve() -> None:
        beating = asyncio.create_task(beat(arguments.beat_fd, config.heartbeat_interval_s))
        await server.serve(sockets=[listener])
        beating.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


async def beat(fd: int | None, interval_s: float) -> None:
    """Show whoever reads the pipe that the event loop turns."""
    while fd is not None:
        with suppress(BlockingIOError):
            os.write(fd, b".")
        await asyncio.sleep(interval_s)


def _allow_many_connections() -> None:
    """Each client is an open file; many systems allow 1024 of them unless asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
