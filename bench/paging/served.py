"""One deployment under measurement: started with given flags, loaded, watched meanwhile, and stopped."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.load import closed_loop
from bench.pageplane_target import PageplaneTarget
from bench.paging.models import ServedModel
from bench.paging.observed import Kernel, PoolSample, summarise
from bench.processes import start_pageplane
from bench.record import Observed
from bench.stats import run_stats
from bench.workload import Request
from client import RequestRejected
from protocol.arrays import unpack
from protocol.messages import STEP_COLUMNS, ReplicaStatus, Snapshot

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 300.0
LOOK_S = 0.05
"""Between two looks at the server. Of its step records it keeps 256: none is missed while steps take 0.2 ms or more."""
_NO_STEPS = np.zeros((0, len(STEP_COLUMNS)), dtype=np.int32)
PROFILE_S = 5.0
"""A profile ends after so long, however few steps it has seen."""


class ServedFailed(Exception):
    """A request of a load failed: nothing that was measured counts."""


class Served:
    """One worker, no gateway, the client plane. An asynchronous context: started at its begin, stopped at its end."""

    def __init__(self, name: str, model: ServedModel, block_size: int, slots: int, flags: Sequence[str]):
        """slots: of KV memory. flags: further ones of launch.py."""
        self.name = name
        self.model = model
        self.block_size = block_size
        self.flags = [
            *("--workers", "1", "--no-gateway", "--block-size", str(block_size)),
            *("--kv-memory", str((slots // block_size + 1) * block_size * model.slot_bytes)),  # and the null block
            *flags,
        ]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Served:
        """Raises StartFailed."""
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            arguments = shlex.join([*self.model.flags(folder), *self.flags])
            server, _, ready = await asyncio.to_thread(
                start_pageplane, arguments, folder / "ready.json", folder / "log.txt", START_TIMEOUT_S
            )
            self._stack.enter_context(server)
            self._target = PageplaneTarget(self.name, ready["endpoints"]["client"])
            self._stack.push_async_callback(self._target.close)
            await self._target.open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def run(
        self, requests: Sequence[Request], at_once: int, profile_steps: int = 0, profile_from: int = 0
    ) -> dict[str, Any]:
        """All of the requests, at most `at_once` at a time: the keys of RunStats, Seen and `kernel` (or None).

        profile_steps: profile so many steps, once profile_from tokens are generated. Raises ServedFailed.
        """
        watch = _Watch(await self._look(0), profile_from)
        done = asyncio.Event()
        watching = asyncio.create_task(self._watch(watch, done, profile_steps))
        try:
            records = await closed_loop(self._target, requests, at_once, timeout_s=REQUEST_TIMEOUT_S)
        finally:
            done.set()
            kernel = await watching
        stats = run_stats(Observed(records))
        if stats.failed:
            raise ServedFailed(f"{self.name}: {stats.failed} of {len(requests)} requests failed: {stats.errors}")
        begin, end = watch.first, watch.last
        seen = summarise(
            np.concatenate([*watch.steps, _NO_STEPS]),
            watch.samples,
            self.block_size,
            end.preemptions - begin.preemptions,
            end.prefix_queries - begin.prefix_queries,
            end.prefix_hits - begin.prefix_hits,
        )
        return asdict(stats) | asdict(seen) | {"kernel": asdict(kernel) if kernel else None}

    async def _watch(self, watch: _Watch, done: asyncio.Event, profile_steps: int) -> Kernel | None:
        """Look until `done` and once more."""
        profile: asyncio.Task[Kernel | None] | None = None
        over = False
        while not over:
            over = done.is_set()
            watch.take(await self._look(watch.number))
            if profile_steps and profile is None and watch.generated >= watch.profile_from:
                profile = asyncio.create_task(self._profile(profile_steps))
            if not over:
                try:
                    await asyncio.wait_for(done.wait(), LOOK_S)
                except TimeoutError:
                    pass
        return await profile if profile is not None else None

    async def _profile(self, steps: int) -> Kernel | None:
        try:
            report = await self._target.client.profile(0, steps=steps, seconds=PROFILE_S)
        except RequestRejected:
            return None  # the load was over before a step ran
        return Kernel.of(report.profile)

    async def _look(self, number: int) -> Snapshot:
        return await self._target.client.snapshot([number])


class _Watch:
    """What the looks at one replica add up to, from `before` on."""

    def __init__(self, before: Snapshot, profile_from: int):
        self.first: ReplicaStatus = before.status.replicas[0]
        self.profile_from = profile_from
        self.steps: list[NDArray[np.int32]] = []
        self.samples: list[PoolSample] = []
        self.number = 0
        self.take(before)
        self.steps.clear()
        self.samples.clear()

    @property
    def generated(self) -> int:
        return self.last.generated_tokens - self.first.generated_tokens

    def take(self, snapshot: Snapshot) -> None:
        status, replica = snapshot.status.replicas[0], snapshot.replicas[0]
        self.last = status
        steps = unpack(replica.steps, "steps").reshape(-1, len(STEP_COLUMNS))
        if len(steps):
            self.steps.append(steps)
            self.number = int(steps[-1, 0])
        effective = replica.allocated_slots - replica.wasted_slots
        self.samples.append(PoolSample(status.running, effective, status.free_blocks, status.total_blocks))
