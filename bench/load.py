"""How the requests of a round are offered to a target.

A *closed* loop is `concurrency` clients, each sending its next request when its last one has ended. An *open* loop
sends each request when it is due, whatever became of those before. What begins a conversation goes through all its
turns in the place of one request. Knows targets only by their protocol. Records arrival times; what they mean is
bench/stats.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from bench.arrivals import Arrivals
from bench.record import Observed, RequestRecord
from bench.target import Target, TargetError
from bench.workload import Request, Workload

Clock = Callable[[], float]
OnDone = Callable[[RequestRecord], None]


class Load(Protocol):
    """What one round does to a target. The same round does the same to each."""

    @property
    def workload(self) -> Workload: ...

    @property
    def concurrency(self) -> int | None:
        """The most in flight; None: no limit. Beside streams: the number of streams."""
        ...

    def arrivals_as_json(self) -> dict[str, Any]:
        """process: closed, poisson, gamma, trace or sequential; request_rate and burstiness, or None."""
        ...

    async def run(self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float) -> Observed:
        """`on_done` is called workload.num_requests times."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """The requests of a workload, `concurrency` at a time."""

    workload: Workload
    concurrency: int

    def arrivals_as_json(self) -> dict[str, Any]:
        return {"process": "closed", "request_rate": None, "burstiness": None}

    async def run(self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float) -> Observed:
        requests = self.workload.requests(round_index)
        return Observed(await closed_loop(target, requests, self.concurrency, on_done, clock, timeout_s))


@dataclass(frozen=True)
class OpenLoop:
    """The requests of a workload as they arrive: by `arrivals`, or without it at the times that they bring along."""

    workload: Workload
    arrivals: Arrivals | None
    concurrency: int | None = None  # no more than so many in flight: the others wait, and their times run

    def arrivals_as_json(self) -> dict[str, Any]:
        if self.arrivals is None:
            return {"process": "trace", "request_rate": None, "burstiness": None}
        return {"process": "poisson" if self.arrivals.burstiness == 1 else "gamma", **asdict(self.arrivals)}

    async def run(self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float) -> Observed:
        requests = self.workload.requests(round_index)
        if self.arrivals is not None:
            due = self.arrivals.times_s(len(requests), self.workload.seed, round_index)
        else:
            due = [request.arrival_s for request in requests if request.arrival_s is not None]
        return Observed(await open_loop(target, requests, due, self.concurrency, on_done, clock, timeout_s))


async def closed_loop(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    on_done: OnDone = lambda record: None,
    clock: Clock = time.perf_counter,
    timeout_s: float = 600.0,
) -> list[RequestRecord]:
    """Send all requests in order, at most `concurrency` at a time; a record for each turn, in the order of `requests`.

    A request that fails or takes longer than `timeout_s` becomes a record with an error; the load goes on.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
    records: dict[int, list[RequestRecord]] = {}
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for position, request in waiting:  # one iterator for all clients: each request is taken once
            records[position] = await converse(target, request, None, on_done, clock, timeout_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())
    return [record for position in range(len(requests)) for record in records[position]]


async def open_loop(
    target: Target,
    requests: Sequence[Request],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    on_done: OnDone = lambda record: None,
    clock: Clock = time.perf_counter,
    timeout_s: float = 600.0,
) -> list[RequestRecord]:
    """Send request i `due_s[i]` seconds from now; records as of `closed_loop`, their times from when they were due.

    So what this process or a limit on concurrency delays counts as the wait that it is for whoever asks. `timeout_s`
    runs from the sending.
    """
    begin = clock()
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def visitor(request: Request, due: float) -> list[RequestRecord]:
        await asyncio.sleep(max(0.0, begin + due - clock()))
        async with gate:
            return await converse(target, request, begin + due, on_done, clock, timeout_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(visitor(request, due)) for request, due in zip(requests, due_s, strict=True)]
    return [record for task in tasks for record in task.result()]


async def converse(
    target: Target, request: Request, due: float | None, on_done: OnDone, clock: Clock, timeout_s: float
) -> list[RequestRecord]:
    """The request, and then each of its further turns after the answer to the last and some thinking.

    A failed turn fails those after it, since the history they need is not there.
    """
    history = list(request.prompt_token_ids)
    records: list[RequestRecord] = []

    async def say(request: Request, turn: int, start_s: float | None, goes_on: bool) -> None:
        answer: list[int] | None = [] if goes_on else None
        records.append(await measure_request(target, request, clock, timeout_s, start_s, answer, turn))
        history.extend(answer or ())
        on_done(records[-1])

    await say(request, 0, due, bool(request.follow_ups))
    for number, turn in enumerate(request.follow_ups, start=1):
        if records[-1].failure is not None:
            records.append(RequestRecord(turn.output_len, clock(), error="an earlier turn failed", turn=number))
            on_done(records[-1])
            continue
        if turn.think_s > 0:
            await asyncio.sleep(turn.think_s)
        history.extend(turn.token_ids)
        next_request = Request(request.index, tuple(history), turn.output_len)
        await say(next_request, number, None, number < len(request.follow_ups))
    return records


async def measure_request(
    target: Target,
    request: Request,
    clock: Clock,
    timeout_s: float,
    start_s: float | None = None,
    answer: list[int] | None = None,
    turn: int = 0,
) -> RequestRecord:
    """Send one request now and wait for its end. Its times count from `start_s`, if given, else from now."""
    record = RequestRecord(request.output_len, clock() if start_s is None else start_s, turn=turn)
    try:
        async with asyncio.timeout(timeout_s):
            await stream_into(record, target, request, clock, answer=answer)
    except TimeoutError:
        record.error = f"not finished after {timeout_s:g} s"
    return record


async def stream_into(
    record: RequestRecord,
    target: Target,
    request: Request,
    clock: Clock,
    on_tokens: Callable[[int], None] = lambda count: None,
    answer: list[int] | None = None,
) -> None:
    """Send the request; its chunks are added to the record as they arrive, and why it failed, if it did."""
    try:
        async for count in target.stream(request, answer):
            record.arrivals.append((clock(), count))
            on_tokens(count)
    except TargetError as failure:
        record.error = str(failure)
