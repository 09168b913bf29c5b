"""Bad requests are refused by the name of what is wrong, and the next good one is served as if nothing had been."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protocol import messages as m
from protocol.arrays import pack
from scheduler import events as e
from tests.scheduler.deployment import VOCAB, Deployment, greedy

GOOD = {"request_id": "r", "token_ids": pack([1, 2, 3]), "sampling": greedy(4)}

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": -math.inf}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": -(2**40)}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": -0.5}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_p": math.inf}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
]

BAD_SUBMITS: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": b""}, "invalid_request", "token_ids"),
    ({"token_ids": b"\0"}, "invalid_request", "token_ids"),
    ({"token_ids": b"\0" * 7}, "invalid_request", "token_ids"),
    ({"token_ids": pack([1, -1])}, "invalid_request", "token_ids"),
    ({"token_ids": pack([-(2**31)])}, "invalid_request", "token_ids"),
    ({"token_ids": pack([VOCAB])}, "invalid_request", "token_ids"),
    ({"token_ids": pack([2**31 - 1, 5])}, "invalid_request", "token_ids"),
    ({"token_ids": pack([1] * 256)}, "too_long", "token_ids"),
    ({"token_ids": pack([1] * 100_000)}, "too_long", "token_ids"),
    ({"token_ids": pack([1] * 255)}, "too_long", "token_ids"),  # fits the model, not the pool
    ({"request_id": ""}, "invalid_request", "request_id"),
    ({"request_id": "x" * 257}, "invalid_request", "request_id"),
]

CASES = [
    *(({"sampling": greedy(**{"max_tokens": 4, **bad})}, "invalid_request", name) for bad, name in BAD_SAMPLING),
    *BAD_SUBMITS,
]


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    """One for all cases: whatever a bad request leaves behind meets the next ones."""
    return Deployment(num_blocks=1 + 60)


@pytest.mark.parametrize(("changes", "code", "param"), CASES, ids=lambda value: str(value)[:60])
def test_a_bad_request_is_refused_by_name_and_the_next_is_served(
    deployment: Deployment, changes: dict[str, Any], code: str, param: str
) -> None:
    submit = m.Submit(**{**GOOD, **changes})
    before = len(deployment.engine.requests)
    actions = deployment.engine.handle(e.FromClient(b"client", submit), 0.0)
    (action,) = [action for action in actions if isinstance(action, e.ToClient)]
    assert isinstance(action.message, m.Rejected)
    assert (action.message.request_id, action.message.code, action.message.param) == (submit.request_id, code, param)
    assert len(action.message.message) > 10
    assert len(deployment.engine.requests) == before
    name = f"good-{len(deployment.finished)}"
    deployment.submit(name, [1, 2, 3], greedy(2))
    deployment.run()
    assert deployment.tokens[name] == deployment.golden(name)
    deployment.check_idle()


def test_an_id_that_is_running_is_refused_and_the_running_one_unharmed() -> None:
    deployment = Deployment()
    deployment.submit("r", [7, 8, 9], greedy(5))
    deployment.handle(e.FromClient(b"other", m.Submit("r", pack([1, 2, 3]), greedy(4))))
    assert deployment.rejected["r"].code == "duplicate_request" and deployment.rejected["r"].param == "request_id"
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r") and deployment.finished["r"].reason == "length"
    deployment.check_idle()


def test_the_values_at_the_edges_are_accepted() -> None:
    deployment = Deployment(num_blocks=1 + 64)
    edges: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 2**40},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": 0, "temperature": 1.0},
        {"seed": 2**64 - 1, "temperature": 1.0},
        {"min_tokens": 4},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"stop_token_ids": tuple(range(64))},
    ]
    for number, edge in enumerate(edges):
        deployment.submit(f"r{number}", [0, VOCAB - 1], greedy(4, **edge))
    deployment.run()
    assert not deployment.rejected and len(deployment.finished) == len(edges)
    deployment.check_idle()


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    deployment = Deployment(num_blocks=1 + 64)
    deployment.submit("r", [1] * 255, greedy(10))
    deployment.run()
    assert deployment.finished["r"].reason == "length"
    assert deployment.tokens["r"] == deployment.golden("r") and len(deployment.tokens["r"]) == 1


def test_a_full_queue_refuses_and_recovers() -> None:
    deployment = Deployment(max_waiting=3, max_num_seqs=1, max_num_batched_tokens=8)
    for number in range(5):
        deployment.submit(f"r{number}", [1, 2, 3], greedy(2))
    assert list(deployment.rejected) == ["r4"] and deployment.rejected["r4"].code == "overloaded"
    deployment.run()
    deployment.submit("again", [1, 2, 3], greedy(2))
    deployment.run()
    assert deployment.tokens["again"] == deployment.golden("again")


def test_an_id_may_be_used_again_when_its_request_is_over() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(2))
    deployment.run()
    deployment.tokens.clear()
    deployment.submit("r", [4, 5, 6], greedy(3))
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_request_without_a_seed_gets_one_that_survives_recovery() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], m.SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True))
    seed = deployment.sent_plans[0].admit[0].sampling.seed
    assert seed is not None and 0 <= seed < 2**64
    deployment.step()
    deployment.kill()
    deployment.start()
    (again,) = [plan.admit[0] for plan in deployment.sent_plans if plan.epoch == 1 and plan.admit]
    assert again.sampling.seed == seed
    deployment.run()
    assert deployment.finished["r"].usage.completion_tokens == 6


def test_the_models_own_end_is_a_stop_unless_ignored() -> None:
    deployment = Deployment(vocab_size=4, num_blocks=1 + 64)
    for number in range(8):
        deployment.submit(f"r{number}", [0, number % 4, number // 4], greedy(30, ignore_eos=False))
        deployment.submit(f"i{number}", [0, number % 4, number // 4], greedy(30))
    deployment.run()
    for number in range(8):
        assert deployment.tokens[f"r{number}"] == deployment.golden(f"r{number}")
        assert deployment.finished[f"i{number}"].reason == "length"
    assert "stop" in {finished.reason for finished in deployment.finished.values()}
    deployment.check_idle()
