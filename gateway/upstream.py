"""The line to the scheduler: one `AsyncClient`, replaced when the scheduler comes back at another address."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from client import AsyncClient, ClientError, ServerUnavailable
from protocol.messages import MetricsSnapshot, Status
from protocol.runtime import RuntimeFolderError, read_endpoints

WATCH_S = 0.2
"""How often we look whether another scheduler has been published."""
STATUS_AGE_S = 0.05
"""Questions that come within this time share one answer."""
STATUS_TIMEOUT_S = 2.0
"""A scheduler that lives answers in milliseconds."""


class Upstream:
    """Connects when first asked for; not across event loops."""

    def __init__(self, runtime: Path):
        self._runtime = runtime
        self._published: int | None = None
        """Modification time of the endpoints.json that was read last, in ns."""
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._status: Status | None = None
        self._status_at = float("-inf")

    async def client(self) -> AsyncClient:
        """A client of the scheduler as published now. Raises ServerUnavailable when there never was one."""
        try:
            published = (self._runtime / "endpoints.json").stat().st_mtime_ns
        except OSError:
            published = None  # it is being replaced: what is sent now, its successor at the same address will read
        if self._client is not None and published in (None, self._published):
            return self._client
        async with self._connecting:
            return await self._connect(published)

    async def _connect(self, published: int | None) -> AsyncClient:
        if self._client is not None and published == self._published:
            return self._client  # someone else did it meanwhile
        try:
            endpoint = read_endpoints(self._runtime).client
        except RuntimeFolderError as error:
            raise ServerUnavailable(f"the scheduler is not there: {error}") from None
        old = self._client
        if old is None or old.endpoint != endpoint:
            self._client = await AsyncClient(endpoint).__aenter__()
            if old is not None:  # what it still waits for is lost with the scheduler that it knew
                await old.__aexit__(ServerUnavailable, None, None)
        else:
            old.ask_after_all()  # a new scheduler may not know what the old one had accepted
        self._published = published
        assert self._client is not None
        return self._client

    async def watch(self) -> None:
        """Notice a new scheduler at once; requests of the old one would else wait until they have been silent for long.
        Runs until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._client is not None:
                with suppress(ClientError):
                    await self.client()

    async def status(self) -> Status | None:
        """A snapshot, at most STATUS_AGE_S old; None when the scheduler does not answer."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now - self._status_at > STATUS_AGE_S:
                try:
                    async with asyncio.timeout(STATUS_TIMEOUT_S):
                        self._status = await (await self.client()).status()
                except (ClientError, TimeoutError):
                    self._status = None
                self._status_at = asyncio.get_running_loop().time()
            return self._status

    async def metrics(self) -> MetricsSnapshot | None:
        """Everything the scheduler counts; None when it does not answer."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await (await self.client()).metrics()
        except (ClientError, TimeoutError):
            return None

    async def can_generate(self) -> bool:
        """Whether a replica is alive."""
        status = await self.status()
        return status is not None and any(replica.state == "ready" for replica in status.replicas)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(ServerUnavailable, None, None)
            self._client = None
