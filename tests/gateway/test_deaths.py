"""Processes die under HTTP clients: who can go on does, with the same tokens; who cannot is told, and nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import httpx

from tests.chaos import streams
from tests.gateway.conftest import WORKERS
from tests.gateway.wire import SOON_S, TEXT, Answer, Begun, mixed_bodies, post, post_all
from tests.integration.deployment import Deployment

SHORT: dict[str, Any] = {"prompt": "good", "max_tokens": 2, "temperature": 0}


def incomplete(answer: Answer) -> bool:
    """Nothing in it pretends to be an end."""
    return answer.finish_reason is None and "[DONE]" not in answer.events


def test_streams_outlive_their_worker_token_for_token(server: Deployment, url: str, http: httpx.Client) -> None:
    bodies = mixed_bodies(12, 160)
    golden = asyncio.run(post_all(url, bodies))
    assert all(len(answer.token_ids) == 160 for answer in golden)
    recoveries, pid = server.recoveries(), server.pids["worker-0"]
    kill = Begun(12, 20, lambda: server.kill("worker-0"))
    again = asyncio.run(post_all(url, bodies, kill))
    assert kill.called
    assert [answer.outcome for answer in again] == [answer.outcome for answer in golden]
    assert server.recoveries() > recoveries
    health = server.wait_until(lambda: _other_than(http, "ok"), SOON_S, "/health tells of the worker that is gone")
    assert (health["status"], len(health["replicas"])) == ("degraded", 2)
    server.wait_in_service(WORKERS, [pid])
    assert http.get("/health").json()["status"] == "ok"


def _other_than(http: httpx.Client, status: str) -> dict[str, Any]:
    answer = http.get("/health")
    assert answer.status_code == 200, "one replica lives"
    found: dict[str, Any] = answer.json()
    return found if found["status"] != status else {}


def test_without_workers_a_deadline_ends_a_request_and_patience_is_rewarded(
    server: Deployment, url: str, http: httpx.Client
) -> None:
    dead = [server.kill(name) for name in WORKERS]
    patient = {**SHORT, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}

    async def main() -> tuple[Answer, Answer]:
        urgent, waits = await asyncio.gather(post(url, TEXT, {**SHORT, "timeout": 0.3}), post(url, TEXT, patient))
        return urgent, waits

    server.wait_until(lambda: http.get("/health").status_code == 503, SOON_S, "/health says that nothing can be done")
    urgent, waits = asyncio.run(main())
    assert urgent.status == 503 and urgent.headers["retry-after"]
    assert urgent.error and urgent.error["code"] == "no_replica"
    assert (waits.status, len(waits.token_ids), waits.finish_reason) == (200, 2, "length")
    server.wait_in_service(WORKERS, dead)


def test_a_killed_gateway_comes_back_at_its_port_and_leaves_nothing_behind(server: Deployment, url: str) -> None:
    pid = server.pids["gateway"]
    kill = Begun(8, 5, lambda: os.kill(pid, signal.SIGKILL))
    left = asyncio.run(post_all(url, [*mixed_bodies(8, 4000), {**SHORT, "max_tokens": 4000, "ignore_eos": True}], kill))
    assert kill.called
    assert all(answer.broke_off and incomplete(answer) for answer in left)
    began = time.monotonic()
    answer = asyncio.run(post(url, TEXT, SHORT))  # sent at once: it waits in the socket that the supervisor holds
    assert answer.status == 200 and time.monotonic() - began < 2 * SOON_S
    server.wait_idle(SOON_S)
    server.wait_until(lambda: server.pids["gateway"] != pid, SOON_S, "the new gateway in the ready file")
    assert server.endpoints["http"] == url


def test_a_gateway_that_stands_still_holds_up_nobody_else_and_goes_on(server: Deployment, url: str) -> None:
    bodies = mixed_bodies(6, 200)
    golden = asyncio.run(post_all(url, bodies))
    wishes = streams.wishes(6, 100)
    expected = streams.run(server.endpoints["client"], wishes)

    async def main() -> tuple[list[streams.Answer], list[Answer]]:
        stopped = asyncio.Event()

        def stop() -> None:
            server.kill("gateway", signal.SIGSTOP)
            stopped.set()

        over_http = asyncio.create_task(post_all(url, bodies, Begun(6, 5, stop)))
        await stopped.wait()
        try:
            others = await asyncio.to_thread(streams.run, server.endpoints["client"], wishes)
        finally:
            server.kill("gateway", signal.SIGCONT)
        return others, await over_http

    others, over_http = asyncio.run(main())
    assert others == expected
    assert [answer.outcome for answer in over_http] == [answer.outcome for answer in golden]


def test_when_the_scheduler_dies_clients_are_told_and_then_served_again(server: Deployment, url: str) -> None:
    pids = server.pids
    kill = Begun(4, 5, lambda: server.kill("scheduler"))
    bodies = [*mixed_bodies(4, 4000), {**SHORT, "max_tokens": 4000, "ignore_eos": True}]
    *streamed, whole = asyncio.run(post_all(url, bodies, kill))
    server.close_client()
    assert kill.called
    for answer in streamed:
        assert answer.status == 200 and incomplete(answer)
        assert answer.error and answer.error["code"] == "request_lost" and "send it again" in answer.error["message"]
    assert whole.status == 503 and whole.error and whole.error["code"] == "request_lost"
    assert whole.headers["retry-after"]
    server.wait_until(lambda: server.pids["scheduler"] != pids["scheduler"], 30, "a new scheduler")
    assert asyncio.run(post(url, TEXT, SHORT)).status == 200, "it waits until a worker is there"
    assert server.pids["gateway"] == pids["gateway"]
    server.wait_in_service(WORKERS)
