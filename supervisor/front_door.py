"""The HTTP listener and the gateway process behind it.

The supervisor holds the listening socket: a busy port is known before anything is started, and while a gateway is
replaced new connections wait for its successor instead of being refused. A gateway shows by beats through a pipe that
its event loop turns; one that hangs is killed and replaced like one that died.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from protocol.config import EngineConfig
from supervisor.backoff import Backoff
from supervisor.child import Child
from supervisor.prepare import StartFailed
from supervisor.processes import Commands
from supervisor.terminal import Terminal

BACKLOG = 1024
"""Connections that wait while no gateway takes them."""

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
    beats: int | None = None
    """Descriptor from which the gateway's beats are read; None once it has closed its end."""
    heard_at: float = 0.0
    """When it was started, or the last beat came."""
    serving_since: float | None = None
    """Its first beat."""
    hangs: bool = False
    """It was killed for its silence."""
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
        self.beats, theirs = os.pipe()
        os.set_blocking(self.beats, False)
        try:
            self.child = Child("gateway", *commands.gateway(fd, theirs), terminal, pass_fds=(fd, theirs))
        finally:
            os.close(theirs)
        self.heard_at, self.serving_since, self.hangs = time.monotonic(), None, False
        self.restart_at = None
        return self.child

    def hear(self) -> bool:
        """Take note of the beats that came. False: none will come any more."""
        assert self.beats is not None
        with suppress(BlockingIOError):
            if not os.read(self.beats, 4096):
                return False
            self.heard_at = time.monotonic()
            self.serving_since = self.serving_since or self.heard_at
        return True

    def silent_at(self, config: EngineConfig) -> float | None:
        """When a gateway must be taken for hanging if no beat comes. None: there is none, or it was."""
        if self.child is None or self.hangs:
            return None
        limit = config.start_timeout_s if self.serving_since is None else config.heartbeat_timeout_s
        return self.heard_at + limit

    def kill_hanging(self) -> None:
        """It has been silent for too long."""
        assert self.child is not None
        self.hangs = True
        self.child.send_signal(signal.SIGKILL)

    def close_beats(self) -> None:
        """Nothing more is heard of this gateway."""
        if self.beats is not None:
            os.close(self.beats)
            self.beats = None

    def ended(self, how: str) -> float:
        """The gateway is gone; the seconds until its restart, which is now planned."""
        assert self.child is not None
        if self.hangs:
            how = f"hung: no beat for {time.monotonic() - self.heard_at:.1f} s"
        self.problem = self.child.last_words(how, was_ready=self.serving_since is not None)
        self.child = None
        now = time.monotonic()
        delay = self.backoff.after_death(None if self.serving_since is None else now - self.serving_since)
        self.restart_at = now + delay
        return delay
