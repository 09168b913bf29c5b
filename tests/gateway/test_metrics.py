"""/metrics of a running deployment: readable by Prometheus' parser, and every value is what was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric

from protocol import messages as m
from tests.client.scripted_server import ScriptedServer
from tests.gateway.conftest import WORKERS
from tests.gateway.exposition import families, total
from tests.gateway.in_process import ask
from tests.integration.deployment import Deployment


def read(http: httpx.Client) -> dict[str, Metric]:
    answer = http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return families(answer.text)


def complete(http: httpx.Client, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def change(http: httpx.Client, action: Callable[[], object]) -> Callable[..., float]:
    """What `action` adds to a sample, over all replicas."""
    before = read(http)
    action()
    after = read(http)
    return lambda name, **labels: total(after, name, **labels) - total(before, name, **labels)


def test_known_requests_give_exact_counts(http: httpx.Client) -> None:
    def requests() -> None:
        complete(http, "Nobody asked this before: one", 5)
        complete(http, "And nobody asked this: two", 7, n=2, temperature=1, seed=1)

    prompts = len("Nobody asked this before: one") + 2 * len("And nobody asked this: two")
    tokens = 5 + 2 * 7
    added = change(http, requests)
    assert added("prompt_tokens_total") == prompts
    assert added("prefix_cache_queries_total") == prompts
    assert added("generation_tokens_total") == tokens
    assert added("request_success_total") == added("request_success_total", finished_reason="length") == 3
    assert added("time_to_first_token_seconds_count") == added("e2e_request_latency_seconds_count") == 3
    assert added("request_queue_time_seconds_count") == added("request_decode_time_seconds_count") == 3
    assert added("inter_token_latency_seconds_count") == tokens - 3
    assert added("request_prompt_tokens_sum") == prompts
    assert added("request_generation_tokens_sum") == tokens
    assert added("http_choices_total", finished_reason="length") == 3
    assert added("http_prompt_tokens_total") == len("Nobody asked this before: one") + len("And nobody asked this: two")
    steps = added("iteration_tokens_count")
    assert steps >= 7
    for stage in ("schedule", "apply", "commit", "forward", "sample", "result"):
        assert added("step_stage_seconds_count", stage=stage) == steps
        assert added("step_stage_seconds_sum", stage=stage) > 0
    assert added("step_stage_seconds_sum", stage="forward") < added("e2e_request_latency_seconds_sum")
    assert added("plan_bytes_sum") >= added("plan_bytes_count") * 38


def test_a_stop_string_counts_as_success(http: httpx.Client) -> None:
    text = complete(http, "The end is near.", 32)["choices"][0]["text"]
    stop = next(character for character in text if character.isascii())
    added = change(http, lambda: complete(http, "The end is near.", 64, stop=[stop]))
    assert added("request_success_total", finished_reason="stop") == 1
    assert added("http_choices_total", finished_reason="stop") == 1


def test_a_prompt_that_is_repeated_hits_all_but_its_last_block(http: httpx.Client) -> None:
    prompt = "x" * 50
    complete(http, prompt, 1, cache_salt="metrics")
    added = change(http, lambda: complete(http, prompt, 1, cache_salt="metrics"))
    assert (added("prefix_cache_queries_total"), added("prefix_cache_hits_total")) == (50, 48)


def test_one_kill_is_one_recovery_and_one_epoch(http: httpx.Client, server: Deployment) -> None:
    def kill() -> None:
        pid = server.kill("worker-1")
        server.wait_in_service(WORKERS, [pid])

    added = change(http, kill)
    assert added("recoveries_total") == added("recoveries_total", engine="1") == 1
    assert added("replica_epoch", engine="1") == 1 and added("replica_epoch", engine="0") == 0
    assert total(read(http), "replica_up", engine="1") == 1


def test_a_gateway_that_is_replaced_loses_none_of_the_schedulers_counts(http: httpx.Client, server: Deployment) -> None:
    complete(http, "Count this", 3)

    def kill() -> None:
        old = server.kill("gateway")
        server.wait_until(lambda: server.pids["gateway"] != old, 30, "another gateway")

    added = change(http, kill)
    assert added("generation_tokens_total") == 0
    assert added("time_to_first_token_seconds_count") == 0
    assert added("request_success_total") == 0


def test_without_a_scheduler_the_rest_is_still_told(tmp_path: Path) -> None:
    def silent(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        return True  # heard, and nothing is said

    async def questions(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        found = families((await client.get("/metrics")).text)
        assert total(found, "scheduler_up") == 0
        assert "pageplane:generation_tokens" not in found
        assert total(found, "http_time_to_first_token_seconds_count") == 0

    ask(tmp_path, silent, questions)
