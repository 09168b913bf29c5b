"""`python -m gateway --config FILE --runtime DIR`: started by the supervisor, which hands it a listening socket."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from pathlib import Path

import uvicorn

from gateway.app import build
from protocol import logs
from protocol.config import ConfigError, EngineConfig
from protocol.lifeline import die_with_supervisor

KEEP_ALIVE_S = 75
"""Idle connections are closed after this."""
GRACE_S = 1
"""What running answers get when we are told to stop; the scheduler has ended them by then."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="The HTTP process.")
    parser.add_argument("--config", type=Path, required=True, help="configuration written by the supervisor")
    parser.add_argument("--runtime", type=Path, required=True, help="runtime folder with endpoints.json")
    parser.add_argument("--listener-fd", type=int, help="a listening socket that was inherited (default: open one)")
    arguments = parser.parse_args()
    die_with_supervisor()
    try:
        config = EngineConfig.load(arguments.config)
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    log = logs.set_up("gateway", config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        if arguments.listener_fd is not None:
            listener = socket.socket(fileno=arguments.listener_fd)
        else:
            listener = socket.create_server((config.host, config.port), reuse_port=False)
    except OSError as error:
        log.error("cannot listen on %s, port %d: %s", config.host, config.port, error.strerror)
        return 1
    server = uvicorn.Server(
        uvicorn.Config(
            build(config, arguments.runtime),
            loop="uvloop",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
