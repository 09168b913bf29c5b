"""A closed loop of clients: `concurrency` of them, each sending its next request when its last one has ended.

Knows targets only by their protocol. Records arrival times; what they mean is bench/stats.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from bench.stats import RequestRecord
from bench.target import Target, TargetError
from bench.workload import Request


async def closed_loop(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
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
            records[position] = record = await _measure(target, request, clock, timeout_s)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())
    return [records[position] for position in range(len(requests))]


async def _measure(target: Target, request: Request, clock: Callable[[], float], timeout_s: float) -> RequestRecord:
    start = clock()
    arrivals: list[tuple[float, int]] = []
    error = None
    try:
        async with asyncio.timeout(timeout_s):
            async for count in target.stream(request):
                arrivals.append((clock(), count))
    except TargetError as failure:
        error = str(failure)
    except TimeoutError:
        error = f"not finished after {timeout_s:g} s"
    return RequestRecord(request.output_len, start, arrivals, error)
