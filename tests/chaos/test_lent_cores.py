"""Idle workers lend their cores: no token tells, and who dies or stands still in a step takes nobody along."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np

from client import AsyncClient
from supervisor.prepare import available_cores
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Recording, answers, record, run, wishes
from tests.integration.deployment import Deployment
from worker.lent_cores import BORROWER, FILE, LINE, OWNER

TOKENS = 300
TWO_CORES = available_cores() >= 2
"""With one, there is nothing to lend, and the workers are not told that there were."""


def lines(server: Deployment) -> np.ndarray:
    """int64 [cores, 8]: what the workers of this deployment tell each other."""
    folder = Path(server.endpoints["client"].removeprefix("ipc://")).parent
    return np.memmap(folder / FILE, dtype=np.int64, mode="r").reshape(-1, LINE // 8)


def test_a_lone_stream_uses_the_idle_core_and_its_tokens_do_not_tell(server: Deployment) -> None:
    many = wishes(4, TOKENS)
    golden = run(server.endpoints["client"], many)  # both workers are busy
    borrowed = set()

    def look(recording: Recording) -> None:
        if TWO_CORES:
            borrowed.update(lines(server)[:, BORROWER].tolist())

    async def main() -> list[Recording]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            return [await record(client, wish, look) for wish in many]

    assert answers(asyncio.run(main())) == golden
    assert not TWO_CORES or borrowed & {1, 2}, "nobody borrowed a core"

    def told() -> bool:
        replicas = server.client.metrics().replicas
        done = sum(replica.work_items for replica in replicas)
        lent = sum(replica.borrowed_items for replica in replicas)
        return lent == 0 < done if not TWO_CORES else 0 < lent < done

    server.wait_until(told, 5, "the heartbeats tell of it")


def test_workers_that_die_or_stand_still_in_a_step_take_nobody_along(server: Deployment) -> None:
    """One stream on each worker; the second worker is stopped in a step, the first goes on alone, then the second is
    killed, and its stream is continued."""
    pair = wishes(2, TOKENS)
    golden = run(server.endpoints["client"], pair)
    recoveries = server.recoveries()

    async def main() -> list[Recording]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            begun = [asyncio.Event(), asyncio.Event()]
            streams = []
            for wish, event in zip(pair, begun, strict=True):
                streams.append(asyncio.create_task(record(client, wish, lambda recording, event=event: event.set())))
                await event.wait()
            stop_in_step()
            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            if TWO_CORES:
                assert lines(server)[1, OWNER] == 1 and lines(server)[1, BORROWER] == 0
            server.kill("worker-1")
            return [await stream for stream in streams]

    def stop_in_step() -> None:
        pid = server.pids["worker-1"]

        def stopped() -> bool:
            os.kill(pid, signal.SIGSTOP)
            if not TWO_CORES or lines(server)[1, OWNER]:
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        server.wait_until(stopped, 10, "worker-1 is stopped in a step")

    assert answers(asyncio.run(main())) == golden
    server.wait_in_service(WORKERS)
    assert server.recoveries() == recoveries + 1
