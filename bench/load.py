"""How the requests of a round are offered to a target: here by a closed loop of clients.

A closed loop is `concurrency` clients, each sending its next request when its last one has ended. Knows targets only by
their protocol. Records arrival times; what they mean is bench/stats.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.record import Observed, RequestRecord
from bench.target import Target, TargetError
from bench.workload import Request, Workload

Clock = Callable[[], float]
OnDone = Callable[[RequestRecord], None]


class Load(Protocol):
    """What one round does to a target. The same round does the same to each."""

    @property
    def num_requests(self) -> int:
        """How often a round calls `on_done`."""
        ...

    async def run(
        self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float
    ) -> Observed: ...


@dataclass(frozen=True)
class ClosedLoop:
    """The requests of a workload, `concurrency` at a time."""

    workload: Workload
    concurrency: int

    @property
    def num_requests(self) -> int:
        return self.workload.num_requests

    async def run(self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float) -> Observed:
        requests = self.workload.requests(round_index)
        return Observed(await closed_loop(target, requests, self.concurrency, on_done, clock, timeout_s))


async def closed_loop(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    on_done: OnDone = lambda record: None,
    clock: Clock = time.perf_counter,
    timeout_s: float = 600.0,
) -> list[RequestRecord]:
    """Send all requests in order, at most `concurrency` at a time; one record each, in the order of `requests`.

    A request that fails or takes longer than `timeout_s` becomes a record with an error; the load goes on.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
    records: dict[int, RequestRecord] = {}
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for position, request in waiting:  # one iterator for all clients: each request is taken once
            records[position] = record = await measure_request(target, request, clock, timeout_s)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())
    return [records[position] for position in range(len(requests))]


async def measure_request(target: Target, request: Request, clock: Clock, timeout_s: float) -> RequestRecord:
    """Send one request now and wait for its end."""
    record = RequestRecord(request.output_len, clock())
    try:
        async with asyncio.timeout(timeout_s):
            await stream_into(record, target, request, clock)
    except TimeoutError:
        record.error = f"not finished after {timeout_s:g} s"
    return record


async def stream_into(
    record: RequestRecord,
    target: Target,
    request: Request,
    clock: Clock,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> None:
    """Send the request; its chunks are added to the record as they arrive, and why it failed, if it did."""
    try:
        async for count in target.stream(request):
            record.arrivals.append((clock(), count))
            on_tokens(count)
    except TargetError as failure:
        record.error = str(failure)
