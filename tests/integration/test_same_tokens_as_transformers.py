"""The default model in float32: whatever happens to a request, its tokens are those that `transformers` generates.

Alone, in a batch, preempted, from cached blocks, or moved to another worker after its own was killed.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from client.tokenizer import Tokenizer
from protocol.messages import SamplingParams
from tests.integration.asking import Question, ask_all, ask_each, tokens_of, under
from tests.integration.deployment import ROOT, Deployment
from tests.integration.oracle import Case, judge
from worker import model_store

BLOCK_SIZE = 16
NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 2, 3, 7, 12, 15, 16, 17, 25, 31, 32, 33, 48, 64, 65, 100, 129, 200, 350, 1500)
SAMPLED_LENGTHS = (1, 9, 16, 30, 80)
TINY_POOL = "68MiB"
"""Per worker: 1,540 tokens in float32. The longest request needs 1,516, all together need more than twice as many."""


@pytest.fixture(scope="module")
def model() -> Path:
    return model_store.resolve()


@pytest.fixture(scope="module")
def questions(model: Path) -> list[Question]:
    """20 greedy ones, then 5 sampled ones: pieces of English that begin at different places of one text."""
    text = Tokenizer(model).encode((ROOT / "LICENSE").read_text())
    assert len(text) >= 2000
    questions = []
    for index, length in enumerate(PROMPT_LENGTHS):
        greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        questions.append(Question(text[index * 23 + 1 :][:length], greedy))
    for index, length in enumerate(SAMPLED_LENGTHS):
        sampled = SamplingParams(max_tokens=NUM_TOKENS, temperature=1, seed=1000 + index, ignore_eos=True)
        questions.append(Question(text[index * 29 + 600 :][:length], sampled))
    assert [len(question.prompt) for question in questions] == [*PROMPT_LENGTHS, *SAMPLED_LENGTHS]
    return questions


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with (
        tempfile.TemporaryDirectory(prefix="pp-") as folder,
        Deployment(Path(folder), "--workers", "2", "--dtype", "float32", "--kv-memory", "400MiB") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def alone(deployment: Deployment, questions: list[Question]) -> list[list[int]]:
    """The tokens of every question when it was asked alone, of an empty cache."""
    answers = ask_each(deployment.endpoints["client"], questions)
    assert [answer.usage.cached_tokens for answer in answers] == [0] * len(questions)
    assert all(answer.finish_reason == "length" for answer in answers)
    return tokens_of(answers)


def test_tokens_of_requests_alone_are_those_of_transformers(
    model: Path, questions: list[Question], alone: list[list[int]]
) -> None:
    cases = [
        Case(question.prompt, output, question.sampling) for question, output in zip(questions, alone, strict=True)
    ]
    for case, verdict in zip(cases, judge(model, cases), strict=True):
        assert case.output == verdict.choices, f"prompt of {len(case.prompt)} tokens, margin {verdict.margin:g}"


def test_tokens_in_a_batch_of_all_are_those_of_requests_alone(
    deployment: Deployment, questions: list[Question], alone: list[list[int]]
) -> None:
    answers = ask_all(deployment.endpoints["client"], under("batch", questions))
    assert tokens_of(answers) == alone
    deployment.wait_idle()


def test_tokens_from_a_warm_prefix_cache_are_those_of_requests_alone(
    deployment: Deployment, questions: list[Question], alone: list[list[int]]
) -> None:
    answers = ask_each(deployment.endpoints["client"], questions)
    assert tokens_of(answers) == alone
    expected = [(len(question.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for question in questions]
    assert [answer.usage.cached_tokens for answer in answers] == expected


def test_tokens_are_those_of_requests_alone_when_their_worker_is_killed_midway(
    deployment: Deployment, questions: list[Question], alone: list[list[int]]
) -> None:
    killed: list[int] = []
    recoveries = deployment.recoveries()

    def kill_midway(total: int) -> None:
        if not killed and total >= len(questions) * NUM_TOKENS // 2:
            killed.append(deployment.kill("worker-0", signal.SIGKILL))

    answers = ask_all(deployment.endpoints["client"], under("killed", questions), on_tokens=kill_midway)
    assert killed
    assert tokens_of(answers) == alone
    assert deployment.recoveries() > recoveries
    deployment.wait_in_service(["worker-0", "worker-1"], not_pids=killed)
    deployment.wait_idle()


def test_tokens_of_requests_preempted_again_and_again_are_those_of_requests_alone(
    questions: list[Question], alone: list[list[int]]
) -> None:
    """Every question, and all but the longest once more under another salt, so that no block is shared.

    The worker is frozen until all of them wait: how fast they arrive must not decide how full the pool gets.
    """
    longest = max(range(len(questions)), key=lambda index: len(questions[index].prompt))
    others = [index for index in range(len(questions)) if index != longest]
    again = under("again", [questions[index] for index in others])
    flags = ("--workers", "1", "--dtype", "float32", "--block-size", "4", "--kv-memory", TINY_POOL)
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, Deployment(Path(folder), *flags) as tiny:
        everything = [*questions, *again]
        tiny.kill("worker-0", signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(ask_all, tiny.endpoints["client"], everything)
            tiny.wait_until(lambda: tiny.status().requests == len(everything), 8.0, "all requests to wait")
            tiny.kill("worker-0", signal.SIGCONT)
            answers = asked.result()
        assert tokens_of(answers) == [*alone, *(alone[index] for index in others)]
        assert tiny.preemptions() >= 10
        tiny.wait_idle()
