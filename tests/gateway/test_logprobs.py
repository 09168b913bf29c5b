"""Log-probabilities through the official client: OpenAI's shapes, the model's values, whatever else is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from client.tokenizer import Tokenizer
from tests.gateway.original import logprobs_of
from tests.integration.deployment import Deployment
from tests.tiny_model import tiny_model

TOKENIZER = Tokenizer(tiny_model())
MESSAGES: Any = [{"role": "user", "content": "What is a page?"}]
IDS = {"return_token_ids": True}
LONG = "The quick brown fox jumps over the lazy dog. " * 16
"""720 tokens: more than a step computes."""


def folder_of(server: Deployment) -> str:
    return server.client.server_info().model_path


def text_of(token: int) -> str:
    return TOKENIZER.token_bytes[token].decode("utf-8", "replace")


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 4}, {"presence_penalty": 2, "seed": 4}], ids=str)
def test_chat_tells_the_models_own_probabilities(openai: OpenAI, server: Deployment, options: Any) -> None:
    """Before temperature and penalties, however the token was drawn."""
    answer: Any = openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=5, extra_body=IDS, **options
    )
    choice = answer.choices[0]
    prompt, output = choice.prompt_token_ids, choice.token_ids
    right = logprobs_of(folder_of(server), prompt + output)[len(prompt) - 1 : -1]
    assert len(choice.logprobs.content) == len(output)
    for row, token, told in zip(right, output, choice.logprobs.content, strict=True):
        assert (told.token, bytes(told.bytes)) == (text_of(token), TOKENIZER.token_bytes[token])
        assert told.logprob == pytest.approx(row[token], abs=1e-3)
        best = np.argsort(-row)[:5]
        assert [bytes(candidate.bytes) for candidate in told.top_logprobs] == [TOKENIZER.token_bytes[i] for i in best]
        np.testing.assert_allclose([candidate.logprob for candidate in told.top_logprobs], row[best], atol=1e-3)


def test_a_stream_tells_the_same_token_by_token(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "seed": 3, "n": 2, "extra_body": IDS}
    asked: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = openai.chat.completions.create(**options, **asked)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in openai.chat.completions.create(stream=True, **options, **asked):
        for choice in chunk.choices:
            told = choice.logprobs.content if choice.logprobs else []
            assert len(told) == len(choice.token_ids)
            found[choice.index] += told
    assert found == {choice.index: choice.logprobs.content for choice in whole.choices}  # type: ignore[union-attr]
    plain = openai.chat.completions.create(messages=MESSAGES, **options)
    assert [c.message.content for c in plain.choices] == [c.message.content for c in whole.choices]
    assert all(choice.logprobs is None for choice in plain.choices)


def test_completions_tell_offsets_of_the_text_and_the_likeliest_by_text(openai: OpenAI, server: Deployment) -> None:
    answer: Any = openai.completions.create(
        model="tiny",
        prompt="Once",
        max_tokens=30,
        temperature=1,
        seed=6,
        logprobs=3,
        extra_body={**IDS, "ignore_eos": True},
    )
    choice, told = answer.choices[0], answer.choices[0].logprobs
    right = logprobs_of(folder_of(server), list(b"Once") + choice.token_ids)[3:-1]
    np.testing.assert_allclose(told.token_logprobs, right[range(30), choice.token_ids], atol=1e-3)
    assert told.tokens == [text_of(token) for token in choice.token_ids]
    for place, (row, token, top) in enumerate(zip(right, choice.token_ids, told.top_logprobs, strict=True)):
        likeliest = {text_of(i) for i in np.argsort(-row)[:3]}
        assert set(top) == likeliest | {text_of(token)}
        start = told.text_offset[place]
        if text_of(token).isascii() and token < 256:
            assert choice.text[start : start + 1] == text_of(token)
    assert told.text_offset == sorted(told.text_offset)


def test_logprobs_zero_tells_the_tokens_alone_and_ids_take_the_place_of_texts(openai: OpenAI) -> None:
    answer: Any = openai.completions.create(
        model="tiny", prompt="Once", max_tokens=5, logprobs=0, extra_body={**IDS, "return_tokens_as_token_ids": True}
    )
    choice = answer.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [list(top) for top in choice.logprobs.top_logprobs] == [[token] for token in choice.logprobs.tokens]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("prompt", ["O", "Once upon a time", LONG], ids=len)
def test_prompt_logprobs_are_whole_also_of_long_and_of_cached_prompts(
    openai: OpenAI, server: Deployment, prompt: str, times: int
) -> None:
    for _ in range(times):
        answer: Any = openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, temperature=0, extra_body={"prompt_logprobs": 2}
        )
    told = answer.choices[0].prompt_logprobs
    tokens = list(prompt.encode())
    assert told[0] is None and len(told) == len(tokens)
    right = logprobs_of(folder_of(server), tokens)
    for row, token, candidates in zip(right, tokens[1:], told[1:], strict=False):
        mine = candidates[str(token)]
        assert mine["logprob"] == pytest.approx(row[token], abs=1e-3)
        assert mine["rank"] == 1 + (row > row[token]).sum()
        assert mine["decoded_token"] == chr(token)
        assert set(candidates) == {str(i) for i in [*np.argsort(-row)[:2], token]}


def test_a_chat_tells_its_prompt_beside_the_choices(openai: OpenAI) -> None:
    answer: Any = openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}
    )
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None and all(len(told) == 1 for told in answer.prompt_logprobs[1:])


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_tells_of_prompt_and_output_as_one_text(openai: OpenAI, server: Deployment, max_tokens: int) -> None:
    prompts = ["Once upon", "Ünïcode 日本"]
    options: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "n": 2}
    answer: Any = openai.completions.create(echo=True, logprobs=1, extra_body=IDS, **options)
    streamed: dict[int, Any] = {}
    for chunk in openai.completions.create(echo=True, logprobs=1, stream=True, **options):
        for piece in chunk.choices:
            text, values = streamed.setdefault(piece.index, ("", []))
            more = piece.logprobs.token_logprobs if piece.logprobs else []  # type: ignore[union-attr]
            streamed[piece.index] = (text + piece.text, values + more)  # type: ignore[operator]
    for choice in answer.choices:
        prompt, told = prompts[choice.index // 2], choice.logprobs
        tokens = list(prompt.encode()) + list(choice.token_ids)
        assert choice.text.startswith(prompt) and len(choice.token_ids) <= max_tokens
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        right = logprobs_of(folder_of(server), tokens)[:-1]
        np.testing.assert_allclose(told.token_logprobs[1:], right[range(len(right)), tokens[1:]], atol=1e-3)
        starts = [len(bytes(tokens[:i]).decode("utf-8", "ignore")) for i in range(len(prompt.encode()))]
        assert told.text_offset[: len(starts)] == starts
        assert streamed[choice.index] == (choice.text, told.token_logprobs)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_a_stop_string_ends_the_logprobs_with_the_tokens(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Count: 1 2 3", "max_tokens": 60, "temperature": 1, "seed": 5}
    options["extra_body"] = {"ignore_eos": True, **IDS}
    free = openai.completions.create(**options).choices[0].text
    for stream in (False, True):
        answer: Any = openai.completions.create(stop=free[10:13], logprobs=1, stream=stream, **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        told = [value for choice in choices for value in choice.logprobs.token_logprobs]
        assert len(told) == sum(len(choice.token_ids) for choice in choices)
        assert choices[-1].finish_reason == "stop"
