"""POST /v1/debug/prefix: the same body as a completion or a chat, answered with what the cache would do and why."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

TEXT = "Why did my prefix not hit? Because a cache only knows what it has seen before."  # one token a byte


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/debug/prefix", json={"cache_salt": "debug", **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def best(found: dict[str, Any]) -> dict[str, Any]:
    return dict(max(found["prompts"][0]["replicas"], key=lambda replica: replica["hit_tokens"]))


def test_a_completion_is_foretold_and_its_branch_shown(http: httpx.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 1, "cache_salt": "debug", "temperature": 0}
    before = ask(http, **body)
    assert before["block_size"] == 16 and len(before["prompts"][0]["replicas"]) == 2
    assert best(before)["hit_tokens"] == 0
    assert "nothing that begins like this was ever stored" in best(before)["explanation"]
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usable = (len(TEXT) - 1) // 16 * 16
    after = ask(http, **body)
    assert (after["prompts"][0]["num_tokens"], after["prompts"][0]["usable_tokens"]) == (len(TEXT), usable)
    assert best(after)["hit_tokens"] == usable and best(after)["groups"][0]["missing"] is None
    branch = TEXT[:40] + "X" + TEXT[41:]
    replica = best(ask(http, prompt=branch))
    missing = replica["groups"][0]["missing"]
    assert (replica["hit_tokens"], missing["block"], missing["first_token"], missing["last_token"]) == (32, 2, 32, 47)
    assert missing["text"] == branch[32:48] and missing["reason"] == "never_stored"
    assert "block 2 (tokens 32 to 47)" in replica["explanation"]


def test_a_chat_is_taken_as_it_is(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "cache_salt": "debug chat", "temperature": 0}
    assert best(ask(http, **body))["hit_tokens"] == 0
    done = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    found = ask(http, **body)
    assert found["prompts"][0]["num_tokens"] == done["usage"]["prompt_tokens"]
    assert best(found)["hit_tokens"] == found["prompts"][0]["usable_tokens"] > 0


def test_several_prompts_are_answered_in_order(http: httpx.Client) -> None:
    found = ask(http, prompt=["short", TEXT])
    assert [prompt["num_tokens"] for prompt in found["prompts"]] == [5, len(TEXT)]
    assert "too short" in found["prompts"][0]["replicas"][0]["explanation"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"prompt": "a", "model": "another"}, "model"),
        ({"prompt": "a", "wish": 1}, "wish"),
    ],
)
def test_a_bad_body_is_refused_with_the_parameter_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/debug/prefix", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
