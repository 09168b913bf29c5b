"""Who waits for which tokens: client connections by number, and the requests each one listens to. Pure books."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.messages import FinishReason, Usage
from scheduler.request import Request

KEPT_FINISHED = 1024
"""Finished requests whose outcome can still be attached to."""


class FinishedRequest(NamedTuple):
    """What a client that attaches late still gets. output: int32 [n]."""

    prompt_tokens: int
    output: NDArray[np.int32]
    reason: FinishReason
    usage: Usage
    message: str


class Connection:
    """One client socket. `index` stands for it in the row arrays."""

    __slots__ = ("identity", "index", "requests")

    def __init__(self, identity: bytes, index: int):
        self.identity = identity
        self.index = index
        self.requests: dict[int, Request] = {}
        """By handle: the unfinished requests that report here."""


class Connections:
    """All client connections that have unfinished requests, and the last finished requests."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Connection] = {}
        self._by_index: dict[int, Connection] = {}
        self._next_index = 1
        self._next_handle = 1
        self.finished: OrderedDict[str, FinishedRequest] = OrderedDict()

    def new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1

    def of(self, identity: bytes) -> Connection:
        """The connection of a peer, made if it is new."""
        connection = self._by_identity.get(identity)
        if connection is None:
            connection = Connection(identity, self._next_index)
            self._next_index += 1
            self._by_identity[identity] = self._by_index[connection.index] = connection
        return connection

    def by_index(self, index: int) -> Connection | None:
        return self._by_index.get(index)

    def detach(self, request: Request) -> None:
        """The request reports to its connection no more; a connection without requests is forgotten."""
        connection = self._by_index.get(request.connection)
        if connection is not None:
            connection.requests.pop(request.handle, None)
            if not connection.requests:
                self.forget(connection.identity)

    def forget(self, identity: bytes) -> list[Request]:
        """Drop a connection; returns the unfinished requests that reported to it."""
        connection = self._by_identity.pop(identity, None)
        if connection is None:
            return []
        del self._by_index[connection.index]
        return list(connection.requests.values())

    def remember(self, request: Request, reason: FinishReason, message: str) -> None:
        """Keep the outcome of a finished request for a while."""
        output = request.tokens[request.prompt_len :]
        self.finished[request.request_id] = FinishedRequest(request.prompt_len, output, reason, request.usage, message)
        while len(self.finished) > KEPT_FINISHED:
            self.finished.popitem(last=False)
