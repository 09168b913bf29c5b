"""What a request is said to have cost is what it cost, and edges of the range of a parameter mean what they should."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from tests.integration.deployment import Deployment

BLOCK = 16


def usage_of(openai: OpenAI, prompt: list[int], *, stream: bool, **more: Any) -> tuple[int, int, int, int]:
    """(prompt, completion, total, cached) tokens."""
    options: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    options["extra_body"] = {"ignore_eos": True}
    if stream:
        *_, last = openai.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        usage = last.usage
    else:
        usage = openai.completions.create(**options).usage
    assert usage and usage.prompt_tokens_details
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, cached


@pytest.mark.parametrize(
    "length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 10 * BLOCK]
)
def test_a_prompt_sent_again_is_cached_but_for_its_last_block(openai: OpenAI, server: Deployment, length: int) -> None:
    """At least one token is computed again, to have something to sample from."""
    prompt = [200 - length % 100] * (length - 1) + [length % 256]
    salt = {"extra_body": {"cache_salt": "x"}}
    assert usage_of(openai, prompt, stream=False) == (length, 3, length + 3, 0)
    hit = (length - 1) // BLOCK * BLOCK
    assert usage_of(openai, prompt, stream=False) == (length, 3, length + 3, hit)
    assert usage_of(openai, prompt, stream=True) == (length, 3, length + 3, hit)
    answer = openai.completions.create(model="tiny", prompt=prompt, max_tokens=3, **salt)  # type: ignore[arg-type]
    assert answer.usage and answer.usage.prompt_tokens_details
    assert not answer.usage.prompt_tokens_details.cached_tokens, "another salt shares nothing"


def test_each_prompt_is_counted_once_and_every_choice_in_full(openai: OpenAI) -> None:
    prompts: Any = [[1, 2, 3], [4, 5, 6, 7]]
    for stream in (False, True):
        assert usage_of(openai, prompts, stream=stream, n=3)[:3] == (7, 18, 25)


@pytest.mark.parametrize(
    "edge", [{"temperature": 1e-12}, {"temperature": 1e-5}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}]
)
def test_what_leaves_one_token_is_greedy(openai: OpenAI, edge: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 24}
    greedy = openai.completions.create(temperature=0, **options).choices[0].text
    found = openai.completions.create(extra_body={"temperature": 1.5, "seed": 11, **edge}, **options)
    assert found.choices[0].text == greedy


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 2**31 - 1}, {"top_p": 1}, {"min_p": 0}])
def test_what_leaves_every_token_changes_nothing(openai: OpenAI, off: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 1.5, "seed": 11}
    free = openai.completions.create(**options).choices[0].text
    assert openai.completions.create(extra_body=off, **options).choices[0].text == free
