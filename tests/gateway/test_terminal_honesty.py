"""How a request ends is told as it is: the scheduler's errors become statuses, or events of a stream that has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from protocol import messages as m
from protocol.messages import RejectCode
from tests.client.scripted_server import STATUS, Handler, ScriptedServer
from tests.gateway.in_process import ask, events

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 8}


def post(runtime: Path, handler: Handler | None, body: dict[str, Any], **settings: Any) -> httpx.Response:
    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> httpx.Response:
        return await client.post("/v1/completions", json=body)

    answer: httpx.Response = ask(runtime, handler, question, **settings)
    return answer


def on_submit(script: Callable[[ScriptedServer, bytes, m.Submit], None]) -> Handler:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            script(server, identity, message)
            return True
        return False

    return handler


def says(text: str, reason: m.FinishReason, message: str = "") -> Handler:
    """A model that writes `text`, a token a byte, and ends for `reason`."""

    def script(server: ScriptedServer, identity: bytes, submit: m.Submit) -> None:
        server.accept(identity, submit)
        server.tokens(submit.request_id, 0, list(text.encode()))
        server.finish(submit.request_id, len(text.encode()), reason, message)

    return on_submit(script)


@pytest.mark.parametrize(
    ("code", "status", "answer_code", "param"),
    [
        ("overloaded", 429, "overloaded", None),
        ("shutting_down", 503, "shutting_down", None),
        ("too_long", 400, "context_length_exceeded", "prompt"),
        ("invalid_request", 400, "invalid_request", "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_is_a_status(
    tmp_path: Path, code: RejectCode, status: int, answer_code: str, param: str | None, stream: bool
) -> None:
    param_of_wire = "token_ids" if param else ""

    def script(server: ScriptedServer, identity: bytes, submit: m.Submit) -> None:
        server.send(identity, m.Rejected(submit.request_id, code, "no", param_of_wire))

    answer = post(tmp_path, on_submit(script), {**BODY, "stream": stream, "n": 3})
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["message"]) == (answer_code, param, "no")


@pytest.mark.parametrize(("reason", "code"), [("error", "generation_failed"), ("abort", "aborted")])
def test_a_stream_that_fails_ends_with_an_error_and_nothing_after_it(
    tmp_path: Path, reason: m.FinishReason, code: str
) -> None:
    answer = post(tmp_path, says("hello", reason, "NaN"), {**BODY, "stream": True})
    assert answer.status_code == 200
    *chunks, last = events(answer.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last["error"]["code"] == code


def test_what_fails_before_it_is_whole_is_an_error(tmp_path: Path) -> None:
    answer = post(tmp_path, says("hello", "error", "NaN"), BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert "NaN" in answer.json()["error"]["message"]


def test_one_choice_that_fails_ends_the_others(tmp_path: Path) -> None:
    def script(server: ScriptedServer, identity: bytes, submit: m.Submit) -> None:
        server.accept(identity, submit)
        server.tokens(submit.request_id, 0, [65, 66])
        if submit.request_id.endswith("-1"):
            server.finish(submit.request_id, 2, "error", "broken")

    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        answer = await client.post("/v1/completions", json={**BODY, "n": 3})
        assert answer.status_code == 500 and "broken" in answer.text
        aborts = await asyncio.to_thread(server.wait_for, m.Abort, 2)
        assert {abort.request_id[-2:] for abort in aborts if isinstance(abort, m.Abort)} == {"-0", "-2"}

    ask(tmp_path, on_submit(script), question)


def test_a_pool_that_is_too_small_cuts_the_output_short(tmp_path: Path) -> None:
    choice = post(tmp_path, says("hello", "kv_capacity"), BODY).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "length", "kv_capacity")


def test_a_stop_string_ends_the_request_at_the_scheduler_with_an_exact_usage(tmp_path: Path) -> None:
    """The scheduler has sent more by the time it hears of it."""
    kept: list[m.Submit] = []

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            kept.append(message)
            server.accept(identity, message)
            server.tokens(message.request_id, 0, list(b"ABCDEFGHIJKLM"))
            return True
        if isinstance(message, m.Abort):
            server.tokens(message.request_id, 13, list(b"NO"))
            server.finish(message.request_id, 15, "abort")
            return True
        return False

    body = {**BODY, "max_tokens": 50, "stop": ["DEFGHIJ", "ZZ"], "return_token_ids": True}
    whole = post(tmp_path, handler, body).json()
    assert whole["choices"][0]["text"] == "ABC"
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", "DEFGHIJ")
    assert whole["choices"][0]["token_ids"] == list(b"ABCDEFGHIJ")
    assert whole["usage"]["completion_tokens"] == 10
    streamed = post(tmp_path, handler, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(streamed.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ABC"
    assert usage["usage"] == whole["usage"] and usage["choices"] == [] and done == "[DONE]"
    assert len(kept) == 2


def down(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
    """Nothing is generated, and no replica lives."""
    if isinstance(message, m.Submit):
        server.accept(identity, message)
    elif isinstance(message, m.GetStatus):
        dead = msgspec.structs.replace(STATUS.replicas[0], state="down")
        server.send(identity, msgspec.structs.replace(STATUS, replicas=(dead,)))
    return isinstance(message, m.Submit | m.GetStatus)


@pytest.mark.parametrize("stream", [False, True])
def test_no_replica_until_the_deadline_is_503(tmp_path: Path, stream: bool) -> None:
    for body, settings in (({**BODY, "timeout": 0.3}, {}), (BODY, {"down_timeout_s": 0.3})):
        answer = post(tmp_path, down, {**body, "stream": stream}, **settings)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers


def test_a_deadline_that_passes_while_replicas_live_is_the_clients_own(tmp_path: Path) -> None:
    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        answer = await client.post("/v1/completions", json={**BODY, "timeout": 0.3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (408, "timeout")
        assert await asyncio.to_thread(server.wait_for, m.Abort), "and its blocks are freed"

    ask(tmp_path, on_submit(lambda server, identity, submit: server.accept(identity, submit)), question)


def test_waiting_is_no_error_while_replicas_live(tmp_path: Path) -> None:
    """Asked several times whether anyone lives, the gateway goes on waiting."""
    asked: list[m.GetStatus] = []

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server.accept(identity, message)
            return True
        if isinstance(message, m.GetStatus):
            asked.append(message)
            if len(asked) == 3:
                (request_id,) = server.handles
                server.tokens(request_id, 0, list(b"late"))
                server.finish(request_id, 4, "length")
        return False

    answer = post(tmp_path, handler, BODY, down_timeout_s=0.1)
    assert answer.json()["choices"][0]["text"] == "late"


def test_health_tells_whether_tokens_can_be_generated_now(tmp_path: Path) -> None:
    states = iter((("ready", "ready"), ("down", "ready"), ("down", "down")))

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.GetStatus):
            replicas = (msgspec.structs.replace(STATUS.replicas[0], state=state) for state in next(states))
            server.send(identity, msgspec.structs.replace(STATUS, replicas=tuple(replicas)))
        return isinstance(message, m.GetStatus)

    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        found = []
        for count in (1, 2, 3):
            while len([message for message in server.received if isinstance(message, m.GetStatus)]) < count:
                answer = await client.get("/health")  # the same snapshot may answer several
            found.append((answer.status_code, answer.json()["status"]))
        assert found == [(200, "ok"), (200, "degraded"), (503, "down")]

    ask(tmp_path, handler, question)


def test_a_scheduler_that_is_not_there_is_down_and_the_gateway_says_so(tmp_path: Path) -> None:
    async def question(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        (tmp_path / "endpoints.json").unlink()
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "down", "replicas": [], "waiting": 0})
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert "pageplane:scheduler_up{" in (await client.get("/metrics")).text

    ask(tmp_path, None, question)
