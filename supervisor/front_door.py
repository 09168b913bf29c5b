"""The HTTP listener and the gateway process behind it.

The supervisor holds the listening socket: a busy port is known before anything is started, and while a gateway is
replaced new connections wait for its successor instead of being refused.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from dataclasses import dataclass, field

from protocol.config import EngineConfig
from supervisor.backoff import Backoff
from supervisor.child import Child
from supervisor.prepare import StartFailed
from supervisor.processes import Commands
from supervisor.terminal import Terminal

BACKLOG = 1024
"""Connections that wait while no gateway takes them."""
READY_AFTER_S = 3.0
"""A gateway that lived this long had come to serve; nothing else waits for it, so no one asks it."""

log = logging.getLogger("supervisor")


@dataclass
class FrontDoor:
    """A listening socket, and at most one gateway at a time that inherits it."""

    listener: socket.socket
    url: str
    child: Child | None = None
    restart_at: float | None = None
    problem: str = ""
    """Why the last gateway ended."""
    backoff: Backoff = field(default_factory=Backoff)

    @staticmethod
    def open(config: EngineConfig) -> FrontDoor:
        """Listen where the configuration says. Raises StartFailed naming the port and the flags to choose another."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise StartFailed(f"--host {config.host}: {error.strerror or error}") from None
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StartFailed(
                f"port {config.port} on {config.host} cannot be used for HTTP: {error.strerror}; "
                "choose another with --port (0: any that is free), or --no-gateway"
            ) from None
        host, port = listener.getsockname()[:2]
        if not ipaddress.ip_address(host).is_loopback and not config.api_key:
            log.warning("anyone who reaches %s may use the HTTP API; --api-key asks for a key", host)
        return FrontDoor(listener, f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def start(self, commands: Commands, terminal: Terminal) -> Child:
        """Start a gateway."""
        fd = self.listener.fileno()
        self.child = Child("gateway", *commands.gateway(fd), terminal, pass_fds=(fd,))
        self.restart_at = None
        return self.child

    def ended(self, how: str) -> float:
        """The gateway is gone; the seconds until its restart, which is now planned."""
        assert self.child is not None
        lived = time.monotonic() - self.child.started_at
        was_ready = lived >= READY_AFTER_S
        self.problem = self.child.last_words(how, was_ready=was_ready)
        self.child = None
        delay = self.backoff.after_death(lived if was_ready else None)
        self.restart_at = time.monotonic() + delay
        return delay
