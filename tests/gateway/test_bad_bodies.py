"""What is wrong with a request is said in its answer, and the next request is served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT, TEXT, TOKENS, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
GOOD: dict[str, Any] = {"prompt": "good", "max_tokens": 2, "temperature": 0}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def schema(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": content}}


BAD: list[tuple[str, Any, int, str | None]] = [
    # not JSON, or not an object
    (TEXT, b"", 400, None),
    (TEXT, b"{", 400, None),
    (TEXT, b"null", 400, None),
    (TEXT, b"[]", 400, None),
    (TEXT, b'"text"', 400, None),
    (TEXT, b"\xff\xfe", 400, None),
    (TEXT, b'{"prompt": "\xff"}', 400, None),
    (TEXT, b"[" * 100_000, 400, None),
    (TEXT, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400, None),
    # the prompt
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": None}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt[0]"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, 400, "prompt[1]"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt[0]"),
    (TEXT, {"prompt": [True]}, 400, "prompt[0]"),
    (TEXT, {"prompt": [-1]}, 400, "prompt[0]"),
    (TEXT, {"prompt": [259]}, 400, "prompt"),
    (TEXT, {"prompt": [2**31 - 1]}, 400, "prompt"),
    (TEXT, {"prompt": [2**70]}, 400, "prompt[0]"),
    (TEXT, {"prompt": [[1], [259]]}, 400, "prompt"),
    (TEXT, {"prompt": "x" * 4096}, 400, "prompt"),
    (TEXT, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, None),
    # numbers out of range
    (TEXT, {**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {**GOOD, "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {**GOOD, "max_tokens": 2**63}, 400, "max_tokens"),
    (TEXT, {**GOOD, "max_tokens": "2"}, 400, "max_tokens"),
    (TEXT, {**GOOD, "max_tokens": 1.5}, 400, "max_tokens"),
    (TEXT, {**GOOD, "max_tokens": True}, 400, "max_tokens"),
    (TEXT, {**GOOD, "temperature": -0.1}, 400, "temperature"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, None),
    (TEXT, b'{"prompt": "a", "temperature": Infinity}', 400, None),
    (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, None),
    (TEXT, {**GOOD, "top_p": 0}, 400, "top_p"),
    (TEXT, {**GOOD, "top_p": 1.1}, 400, "top_p"),
    (TEXT, {**GOOD, "top_k": -2}, 400, "top_k"),
    (TEXT, {**GOOD, "min_p": 2}, 400, "min_p"),
    (TEXT, {**GOOD, "n": 0}, 400, "n"),
    (TEXT, {**GOOD, "n": 129}, 400, "n"),
    (TEXT, {**GOOD, "prompt": ["a"] * 100, "n": 100}, 400, "n"),
    (TEXT, {**GOOD, "seed": 2**64}, 400, "seed"),
    (TEXT, {**GOOD, "seed": 1.0}, 400, "seed"),
    (TEXT, {**GOOD, "min_tokens": 3}, 400, "min_tokens"),
    (TEXT, {**GOOD, "timeout": 0}, 400, "timeout"),
    (TEXT, {**GOOD, "priority": 2**40}, 400, "priority"),
    (TEXT, {**GOOD, "cache_salt": ""}, 400, "cache_salt"),
    (TEXT, {**GOOD, "presence_penalty": 2.1}, 400, "presence_penalty"),
    (TEXT, {**GOOD, "frequency_penalty": -2.1}, 400, "frequency_penalty"),
    (TEXT, {**GOOD, "repetition_penalty": 0}, 400, "repetition_penalty"),
    (TEXT, {**GOOD, "repetition_penalty": "1"}, 400, "repetition_penalty"),
    (TEXT, {**GOOD, "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logit_bias": {"five": 1}}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logit_bias": {"-5": 1}}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logit_bias": {"259": 1}}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logit_bias": [[5, 1]]}, 400, "logit_bias"),
    (TEXT, {**GOOD, "logprobs": 21}, 400, "logprobs"),
    (TEXT, {**GOOD, "logprobs": True}, 400, "logprobs"),
    (TEXT, {**GOOD, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (TEXT, {**GOOD, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (CHAT, {**HELLO, "logprobs": 1}, 400, "logprobs"),
    (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {**HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    # stops
    (TEXT, {**GOOD, "stop": ""}, 400, "stop"),
    (TEXT, {**GOOD, "stop": [""]}, 400, "stop[0]"),
    (TEXT, {**GOOD, "stop": [1]}, 400, "stop[0]"),
    (TEXT, {**GOOD, "stop": ["a"] * 17}, 400, "stop"),
    (TEXT, {**GOOD, "stop_token_ids": [259]}, 400, "stop_token_ids"),
    (TEXT, {**GOOD, "stop_token_ids": [-1]}, 400, "stop_token_ids[0]"),
    # what is not served
    (TEXT, {**GOOD, "model": "other"}, 404, "model"),
    (TEXT, {**GOOD, "model": "\u0000'\"<"}, 404, "model"),
    (TEXT, {**GOOD, "suffix": "end"}, 400, "suffix"),
    (TEXT, {**GOOD, "stream_options": {"include_usage": True}}, 400, None),
    (TEXT, {**GOOD, "stream": "yes"}, 400, "stream"),
    (TEXT, {**GOOD, "stream": True, "stream_options": {"other": 1}}, 400, "stream_options.other"),
    (TEXT, {**GOOD, "wrong": 1}, 400, "wrong"),
    # conversations
    (CHAT, {}, 400, "messages"),
    (CHAT, {**HELLO, "messages": []}, 400, "messages"),
    (CHAT, {**HELLO, "messages": "hi"}, 400, "messages"),
    (CHAT, {**HELLO, "messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {**HELLO, "messages": [{"role": 1, "content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {**HELLO, "messages": [{"role": "user"}]}, 400, "messages"),
    (CHAT, {**HELLO, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    (CHAT, {**HELLO, "prompt": "x"}, 400, "prompt"),
    (CHAT, {**HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {**HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {**HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT, {**HELLO, "response_format": schema({"type": "objec"})}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": schema({"enum": []})}, 400, "response_format"),
    (
        CHAT,
        {**HELLO, "response_format": schema({"minimum": 5, "maximum": 4, "type": "integer"})},
        400,
        "response_format",
    ),
    (CHAT, {**HELLO, "response_format": schema({"unevaluatedProperties": False})}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": schema({"$ref": "#/$defs/none"})}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": schema({"title": "x" * 70_000})}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": schema({"enum": ["a"]}), "guided_regex": "a"}, 400, "guided_regex"),
    (TEXT, {**GOOD, "guided_regex": "[a-z"}, 400, "guided_regex"),
    (TEXT, {**GOOD, "guided_regex": "a(?=b)"}, 400, "guided_regex"),
    (TEXT, {**GOOD, "guided_regex": ""}, 400, "guided_regex"),
    (TEXT, {**GOOD, "guided_choice": []}, 400, "guided_choice"),
    (TEXT, {**GOOD, "guided_choice": ["a", ""]}, 400, "guided_choice"),
    (TEXT, {**GOOD, "guided_choice": "a"}, 400, "guided_choice"),
    (TEXT, {**GOOD, "guided_json": "{"}, 400, "guided_json"),
    (TEXT, b'{"prompt": "a", "guided_json": {"maximum": NaN}}', 400, None),
    (TEXT, b'{"prompt": "a", "guided_regex": "\\ud800"}', 400, None),
    (TEXT, {**GOOD, "structured_outputs": {}}, 400, "structured_outputs"),
    (TEXT, {**GOOD, "structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs"),
    (TEXT, {**GOOD, "structured_outputs": {"grammar": "root ::= x"}}, 400, "structured_outputs.grammar"),
    (CHAT, {**HELLO, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    # tokens
    (TOKENS, {}, 400, None),
    (TOKENS, {"prompt": 1}, 400, None),
    (DETOKENIZE, {"tokens": [259]}, 400, "tokens"),
    (DETOKENIZE, {"tokens": ["a"]}, 400, "tokens[0]"),
]


def send(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.post(path, content=content, headers={"Content-Type": "application/json"})


def name(case: Any) -> str:
    return str(case)[:60] if isinstance(case, dict | bytes) else str(case)


def test_the_table_is_large_enough() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=name)
def test_a_bad_body_is_refused_by_name_and_a_good_one_after_it_is_served(
    http: httpx.Client, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = send(http, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if param is not None:
        assert error["param"] == param, error
    good = send(http, TEXT, GOOD)
    assert good.status_code == 200, good.text
    assert good.json()["usage"]["completion_tokens"] in (1, 2)


def test_a_body_that_is_not_announced_as_json_is_told_so(http: httpx.Client) -> None:
    answer = http.post(TEXT, content=json.dumps(GOOD))
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(http: httpx.Client, announced: bool) -> None:
    large = json.dumps({**GOOD, "prompt": "x" * (5 << 20)}).encode()
    content = large if announced else (large[i : i + 65536] for i in range(0, len(large), 65536))
    with http.stream("POST", TEXT, content=content, headers={"Content-Type": "application/json"}) as answer:
        answer.read()
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert send(http, TEXT, GOOD).status_code == 200


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    for answer, status in ((http.get("/v1/nothing"), 404), (http.get(TEXT), 405), (http.post("/v1/models"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_other_origins_get_no_permission(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": "http://elsewhere.example"})
    assert not [header for header in answer.headers if header.startswith("access-control")]
