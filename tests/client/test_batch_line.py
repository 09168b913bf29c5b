"""Lines of a batch file: what is accepted, and the error that each wrong one gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client.commands.batch_line import LineError, read_line, read_object
from protocol.messages import SamplingParams


def read(**fields: Any) -> Any:
    return read_line(read_object(json.dumps(fields)), "served")


def test_defaults_are_those_of_openai_but_for_the_length() -> None:
    assert read(prompt="x").sampling == SamplingParams(max_tokens=256, temperature=1.0, top_p=1.0)


def test_every_field_reaches_the_request() -> None:
    line = read(
        prompt=[1, 2], max_completion_tokens=3, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=5,
        stop_token_ids=[6], ignore_eos=True, min_tokens=2, priority=7, cache_salt="s", n=1, stream=False,
    )  # fmt: skip
    assert line.sampling == SamplingParams(3, 0.5, 4, 0.9, 0.1, 5, (6,), True, 2)
    assert (line.content, line.priority, line.cache_salt) == ([1, 2], 7, "s")


def test_penalties_and_biases_reach_the_request() -> None:
    line = read(prompt="x", presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={"7": 3})
    assert line.sampling == SamplingParams(
        max_tokens=256, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={7: 3.0}
    )


def test_zero_tokens_asked_stay_zero() -> None:
    assert read(prompt="x", max_tokens=0).sampling.max_tokens == 0  # the server refuses it, by name


@pytest.mark.parametrize(
    ("fields", "param", "complaint"),
    [
        ({"prompt": "x", "stop": ["a"]}, "stop", "use stop_token_ids"),
        ({"prompt": "x", "wishes": 1}, "wishes", "unknown field"),
        ({}, "prompt", "either prompt or messages"),
        ({"prompt": "x", "messages": []}, "prompt", "either prompt or messages"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"prompt": 5}, "prompt", "Expected"),
        ({"prompt": ["a"]}, "prompt", "Expected"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "Expected"),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "either"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "Expected"),
        ({"prompt": "x", "seed": 1.5}, "seed", "Expected"),
        ({"prompt": "x", "n": 2}, "n", "one answer"),
        ({"prompt": "x", "logit_bias": {"seven": 1}}, "logit_bias", "token ids"),
        ({"prompt": "x", "model": "other"}, "model", "'served' is"),
        ({"messages": "hello"}, "messages", "Expected"),
    ],
)
def test_wrong_line_names_the_field(fields: dict[str, Any], param: str, complaint: str) -> None:
    with pytest.raises(LineError, match=complaint) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", '"x"', "[" * 100_000])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(LineError, match="JSON"):
        read_object(text)
