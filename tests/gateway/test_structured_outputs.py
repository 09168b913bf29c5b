"""Outputs of a given shape through the official client, drawn at temperature 1 by a model that knows no JSON."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI, OpenAI

from client import AsyncClient, GenerationFailed, SamplingParams
from protocol.messages import StructuredOutputsParams
from tests.integration.deployment import Deployment

MESSAGES: Any = [{"role": "user", "content": "Who is it?"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def check_person(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "age", "tags"}
    assert len(value["name"]) <= 12 and 0 <= value["age"] <= 130
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b", "c"}


def test_a_schema_gives_json_every_time_beside_plain_requests(url: str, openai: OpenAI) -> None:
    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            common: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 400}
            asked = [client.chat.completions.create(response_format=FORMAT, seed=i, n=2, **common) for i in range(6)]
            plain = [client.chat.completions.create(seed=i, **common) for i in range(3)]
            return await asyncio.gather(*asked, *plain)

    answers = asyncio.run(run())
    for answer in answers[:6]:
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            check_person(choice.message.content)
    for i, answer in enumerate(answers[6:]):
        alone = openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=1, max_tokens=400, seed=i)
        assert answer.choices[0].message.content == alone.choices[0].message.content


def test_a_streamed_schema_joins_to_the_same_json(openai: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "seed": 9,
        "max_tokens": 400,
        "response_format": FORMAT,
    }
    whole = openai.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in openai.chat.completions.create(stream=True, **options)]
    assert "".join(pieces) == whole
    check_person(whole or "")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"guided_choice": ["red", "green", "blue"]}, "red|green|blue"),
        ({"guided_json": {"type": "boolean"}}, r"\s*(true|false)\s*"),
        ({"guided_json": '{"type": "null"}'}, r"\s*null\s*"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "x{4}"}}, "xxxx"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, r"\s*[12]\s*"),
        ({"response_format": {"type": "text"}, "guided_choice": ["one"]}, "one"),
        ({"guided_regex": "[ab]{3,9}", "min_tokens": 6}, "[ab]{6,9}"),
        ({"guided_regex": "a{5}|b{5}", "presence_penalty": 2, "logit_bias": {"97": -100}}, "bbbbb"),
    ],
    ids=str,
)
def test_the_output_has_the_shape(openai: OpenAI, options: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        answer = openai.completions.create(model="tiny", prompt="x", seed=seed, max_tokens=60, extra_body=options)
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text
        assert answer.choices[0].finish_reason == "stop"


def test_any_object_begins_one(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=300, seed=1, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_what_cannot_be_followed_is_refused_before_any_worker_sees_it(openai: OpenAI, server: Deployment) -> None:
    before = server.log.stat().st_size
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.completions.create(model="tiny", prompt="x", extra_body={"guided_regex": "(((a"})
    assert (caught.value.param, caught.value.code) == ("guided_regex", "invalid_grammar")
    assert "grammar broke" not in server.text[before:]


def test_a_bad_grammar_that_comes_by_the_client_protocol_fails_its_request_and_no_worker(server: Deployment) -> None:
    pids = server.pids

    async def run() -> None:
        async with AsyncClient(server.endpoints["client"]) as client:
            bad = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="(((a"))
            good = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(choice=("fine",)))
            with pytest.raises(GenerationFailed, match="grammar"):
                await client.complete([1, 2, 3], bad)
            assert await client.generate_text([1, 2, 3], good) == "fine"

    asyncio.run(run())
    assert server.pids == pids
