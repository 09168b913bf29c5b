"""Parameters that change which token is drawn, through the official client, against the formulas over the model's own
logits as `transformers` has them."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from client import SamplingParams
from tests.gateway.original import logits_of
from tests.integration.deployment import Deployment
from tests.tiny_model import IM_END
from tests.worker.formulas import expected

PROMPT = list(b"the cat and the dog and the cat")


def greedy(openai: OpenAI, **options: Any) -> list[int]:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    answer: Any = openai.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=40, extra_body=extra, **options
    )
    return answer.choices[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -0.5, "frequency_penalty": 0.4, "extra_body": {"repetition_penalty": 1.2}},
        {"extra_body": {"repetition_penalty": 1.4, "ignore_eos": True}},
        {"logit_bias": {"97": 4, "98": 3.5, "99": -100}, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_formula(openai: OpenAI, server: Deployment, options: dict[str, Any]) -> None:
    output = greedy(openai, **options)
    named = {**options, **options.get("extra_body", {})}
    bias = {int(token): float(value) for token, value in named.get("logit_bias", {}).items()}
    params = SamplingParams(
        presence_penalty=named.get("presence_penalty", 0.0),
        frequency_penalty=named.get("frequency_penalty", 0.0),
        repetition_penalty=named.get("repetition_penalty", 1.0),
        logit_bias=bias,
    )
    logits = logits_of(server.client.server_info().model_path, PROMPT + output)[len(PROMPT) - 1 : -1]
    for index, token in enumerate(output):
        row = expected(logits[index], PROMPT, output[:index], params)
        assert token == row.argmax(), (index, row[token], row.max())


def test_a_bias_forbids_and_forces(openai: OpenAI) -> None:
    free = greedy(openai)
    assert greedy(openai, logit_bias={str(free[0]): -100})[0] != free[0]
    assert greedy(openai, logit_bias={"65": 100}) == [65] * 40


def test_no_stop_token_before_min_tokens(openai: OpenAI) -> None:
    """A model that is pushed towards its end token ends at once, and with min_tokens just after so many others."""
    push = {str(IM_END): 100}
    assert greedy(openai, logit_bias=push) == [IM_END]
    held = greedy(openai, logit_bias=push, extra_body={"min_tokens": 7})
    assert held.index(IM_END) == len(held) - 1 == 7
    other = greedy(openai, extra_body={"min_tokens": 5, "stop_token_ids": held[:3]})
    assert not set(other[:5]) & {IM_END, *held[:3]}
