"""Clients that vanish, abort or do not read: nothing of theirs stays behind, and nobody else notices."""

from __future__ import annotations

import asyncio
import time

from client import AsyncClient
from protocol import arrays
from protocol import messages as m
from tests.chaos.conftest import MAX_NUM_SEQS
from tests.chaos.raw import Peer, submit
from tests.chaos.streams import NEVER_ATTACH_S, Recording, answers, record, run, wishes
from tests.integration.deployment import Deployment

SOON_S = 5.0


def running(server: Deployment) -> int:
    return sum(replica.running for replica in server.status().replicas)


def test_requests_of_a_client_that_vanished_end_wherever_they_are(server: Deployment) -> None:
    """Running and waiting ones alike, without a word from the client."""
    with Peer(server.endpoints["client"]) as peer:
        for i in range(2 * MAX_NUM_SEQS + 8):
            peer.send(submit(f"gone-{i}", [i + 1, 2, 3], max_tokens=8000))
        server.wait_until(
            lambda: running(server) == 2 * MAX_NUM_SEQS and server.status().waiting == 8, SOON_S, "all rows taken"
        )
    server.wait_idle(SOON_S)


def test_waiting_requests_of_a_client_that_vanished_end_while_others_run(server: Deployment) -> None:
    """They would never be sent a token, so nothing but a look at the client shows that it is gone."""
    with Peer(server.endpoints["client"]) as stays:
        for i in range(2 * MAX_NUM_SEQS):
            stays.send(submit(f"stays-{i}", [i + 1, 2, 3], max_tokens=8000))
        server.wait_until(lambda: running(server) == 2 * MAX_NUM_SEQS, SOON_S, "all rows taken")
        with Peer(server.endpoints["client"]) as leaves:
            for i in range(20):
                leaves.send(submit(f"leaves-{i}", [1, 2, 3]))
            server.wait_until(lambda: server.status().waiting == 20, SOON_S, "20 wait")
        server.wait_until(lambda: server.status().waiting == 0, SOON_S, "nobody waits")
        assert running(server) == 2 * MAX_NUM_SEQS
    server.wait_idle(SOON_S)


def test_fifty_aborts_under_load_return_every_block_and_harm_no_other(server: Deployment) -> None:
    many = wishes(8, 300)
    golden = run(server.endpoints["client"], many)

    async def leave_early(client: AsyncClient, i: int) -> None:
        tokens = 0
        sampling = m.SamplingParams(max_tokens=8000, ignore_eos=True)
        async with client.generate([i + 1] * (i + 1), sampling, detokenize=False) as stream:
            async for chunk in stream:
                tokens += len(chunk.token_ids)
                if tokens > 2 * i:
                    return

    async def main() -> list[Recording]:
        async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
            stay = [asyncio.create_task(record(client, wish)) for wish in many]
            await asyncio.gather(*(leave_early(client, i) for i in range(50)))
            return list(await asyncio.gather(*stay))

    assert answers(asyncio.run(main())) == golden
    server.wait_idle(SOON_S)


def test_client_that_does_not_read_blocks_nobody_and_still_gets_every_token_in_order(server: Deployment) -> None:
    """Two streams of one connection, one on each worker, while it reads nothing; another client is served meanwhile.

    5,000 messages are more than the queues of the sockets and the kernel hold here, so the last ones come merged.
    """
    tokens = 2500
    probe = wishes(4, 50, seed=3)
    golden = run(server.endpoints["client"], probe)
    with Peer(server.endpoints["client"], receive_limit=1) as slow:
        for i in range(2):
            slow.send(submit(f"slow-{i}", [i + 5, 2, 3], max_tokens=tokens))
        server.wait_until(lambda: running(server) == 2, SOON_S, "both run")
        began = time.monotonic()
        assert run(server.endpoints["client"], probe) == golden
        assert time.monotonic() - began < SOON_S
        server.wait_until(lambda: server.status().requests == 0, 60, "all is generated, nothing was read")

        handles: dict[int, list[int]] = {}
        ended: list[m.Finished] = []
        while len(ended) < 2:
            match slow.receive():
                case m.Accepted(handle=handle):
                    handles[handle] = []
                case m.TokenBatch() as batch:
                    pairs = zip(arrays.unpack(batch.handles), arrays.unpack(batch.indices), strict=True)
                    for handle, index in pairs:
                        handles[int(handle)].append(int(index))
                case m.Finished() as finished:
                    ended.append(finished)
                    assert len(handles[finished.handle]) == finished.usage.completion_tokens == tokens
        assert all(indices == list(range(tokens)) for indices in handles.values())
    server.wait_idle()
