"""Workers killed with -9 under streams: every stream goes on as if nothing had happened, and the worker comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from client import AsyncClient
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Answer, Recording, Wish, answers, record, record_all, run, wishes
from tests.integration.deployment import Deployment

STREAMS = 16
TOKENS = 400
SILENCE_S = 8.0
"""Less than the heartbeat limit of 10 s: the death itself was noticed, not the silence after it."""
BACK_S = 30.0


@pytest.fixture(scope="module")
def many() -> list[Wish]:
    return wishes(STREAMS, TOKENS)


@pytest.fixture(scope="module")
def golden(two_workers: Deployment, many: list[Wish]) -> list[Answer]:
    """The same requests without a kill."""
    result = run(two_workers.endpoints["client"], many)
    assert all(len(answer.tokens) == TOKENS and answer.reason == "length" for answer in result)
    assert len({answer.tokens for answer in result}) == STREAMS
    return result


def moved_requests(server: Deployment, offset: int) -> int:
    """How many requests the scheduler has moved since its log was `offset` long."""
    return sum(int(number) for number in re.findall(r"; (\d+) requests go on elsewhere", server.text[offset:]))


async def start_one_by_one(
    client: AsyncClient, many: list[Wish], on_chunk: Callable[[int, Recording], None]
) -> tuple[list[asyncio.Task[Recording]], list[int]]:
    """Start the streams, one after the other, and learn from the status on which replica each one runs."""
    tasks: list[asyncio.Task[Recording]] = []
    homes: list[int] = []
    for i, wish in enumerate(many):
        before = [replica.running for replica in (await client.status()).replicas]
        began = asyncio.Event()

        def chunk_came(recording: Recording, i: int = i, began: asyncio.Event = began) -> None:
            began.set()
            on_chunk(i, recording)

        tasks.append(asyncio.create_task(record(client, wish, chunk_came)))
        await began.wait()
        after = [replica.running for replica in (await client.status()).replicas]
        homes.append(next(r for r, (old, new) in enumerate(zip(before, after, strict=True)) if new > old))
    return tasks, homes


@pytest.mark.parametrize(("watched", "at_token"), [(STREAMS - 1, 1), (STREAMS - 1, TOKENS // 2), (0, TOKENS - 1)])
def test_streams_of_a_killed_worker_lose_and_repeat_no_token(
    server: Deployment, many: list[Wish], golden: list[Answer], watched: int, at_token: int
) -> None:
    """The first token of the last stream, a midway one, the last token but one of the first: each time its worker dies
    at this moment, while the others are wherever they have got to. Both workers are frozen the moment the token comes,
    so that nothing moves until the right one is killed."""
    offset = len(server.text)
    epochs = {replica.replica: replica.epoch for replica in server.status().replicas}
    pids = server.pids

    async def main() -> tuple[list[Recording], int, float]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            reached = asyncio.Event()

            def look(i: int, recording: Recording) -> None:
                if i == watched and len(recording.tokens) >= at_token and not reached.is_set():
                    signal_all(signal.SIGSTOP)
                    reached.set()

            streams, homes = await start_one_by_one(client, many, look)
            await reached.wait()
            os.kill(pids[WORKERS[homes[watched]]], signal.SIGKILL)
            signal_all(signal.SIGCONT)
            killed_at = time.monotonic()
            return list(await asyncio.gather(*streams)), homes[watched], killed_at

    def signal_all(number: signal.Signals) -> None:
        for worker in WORKERS:
            with suppress(ProcessLookupError):
                os.kill(pids[worker], number)

    recordings, home, killed_at = asyncio.run(main())
    assert answers(recordings) == golden
    assert max(recording.longest_silence_s for recording in recordings) < SILENCE_S
    assert moved_requests(server, offset) > 0

    name = WORKERS[home]
    server.wait_in_service(WORKERS, not_pids=[pids[name]])
    assert time.monotonic() - killed_at < BACK_S
    workers = {worker.worker_id: worker for worker in server.status().workers}
    assert server.pids == {**pids, name: workers[name].pid}
    assert workers[name].epoch == epochs[home] + 1
    assert workers[WORKERS[1 - home]].epoch == epochs[1 - home]


def test_streams_outlive_the_death_of_all_workers(server: Deployment, many: list[Wish], golden: list[Answer]) -> None:
    offset = len(server.text)
    halfway = asyncio.Event()

    def look(recording: Recording) -> None:
        if len(recording.tokens) >= TOKENS // 2:
            halfway.set()

    async def main() -> tuple[list[Recording], float]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            streams = asyncio.create_task(record_all(client, many, look))
            await halfway.wait()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            recordings = await streams
            return recordings, killed_at

    pids = [server.pids[name] for name in WORKERS]
    recordings, killed_at = asyncio.run(main())
    assert answers(recordings) == golden
    assert moved_requests(server, offset) == STREAMS
    server.wait_in_service(WORKERS, not_pids=pids)
    assert time.monotonic() - killed_at < 2 * BACK_S


def test_twenty_kills_in_a_row_under_load_change_no_stream(
    server: Deployment, many: list[Wish], golden: list[Answer]
) -> None:
    """Sixteen clients ask without pause; whichever worker is ready is killed, in turns, until twenty have died."""
    kills = 20
    deaths = server.text.count("killed by SIGKILL; restarted")

    async def ask(client: AsyncClient, i: int, done: asyncio.Event) -> list[Recording]:
        recordings = []
        while not done.is_set():
            recordings.append(await record(client, many[i]))
        return recordings

    async def kill(client: AsyncClient, done: asyncio.Event) -> None:
        dead: set[int] = set()
        for victim in in_turns():
            status = await client.status()
            worker = next((w for w in status.workers if w.worker_id == victim), None)
            enough = status.replicas[WORKERS.index(victim)].running > 0
            if worker and worker.state == "ready" and worker.pid not in dead and enough:
                dead.add(worker.pid)
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                if len(dead) == kills:
                    break
            await asyncio.sleep(0.02)  # the pace of looking; what is waited for is the state above
        done.set()

    async def main() -> list[list[Recording]]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            done = asyncio.Event()
            asking = [asyncio.create_task(ask(client, i, done)) for i in range(STREAMS)]
            await kill(client, done)
            return list(await asyncio.gather(*asking))

    by_client = asyncio.run(main())
    for recordings, expected in zip(by_client, golden, strict=True):
        assert recordings
        assert set(answers(recordings)) == {expected}
    assert server.text.count("killed by SIGKILL; restarted") == deaths + kills


def in_turns() -> Iterator[str]:
    while True:
        yield from WORKERS
