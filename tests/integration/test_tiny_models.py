"""Tiny models through whole deployments: backends, block sizes, cache groups, caching off, other sources of weights.

The scheduler proves its invariants after every event in all of them (debug_checks).
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protocol.messages import SamplingParams
from tests.integration import oracle
from tests.integration.asking import Question, ask_all, ask_each, tokens_of, under
from tests.integration.deployment import Deployment
from tests.integration.oracle import Case
from tests.tiny_model import tiny_model
from tests.worker.test_model_store import write_gguf

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
PROMPT_LENGTHS = (1, 2, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 31, 33, 64, 100, 300)
SETTINGS: dict[str, object] = {"debug_checks": True, "max_num_seqs": 20, "max_num_batched_tokens": 64}
"""A step of 64 tokens: the longest prompts are computed in chunks, between the decoding of others."""


class World(NamedTuple):
    kind: str
    backend: str
    block_size: int


WORLDS = [
    World("llama", "cpu", 8),
    World("llama", "torch", 16),
    World("mixed", "cpu", 16),
    World("mixed", "torch", 8),
]


@contextmanager
def deployed(model: Path, *flags: str, **settings: object) -> Iterator[Deployment]:
    """One float32 worker of one thread (the model is tiny); at the end every block must be free again."""
    common = (
        "--model",
        str(model),
        "--workers",
        "1",
        "--dtype",
        "float32",
        "--kv-memory",
        "16MiB",
        "--threads-per-worker",
        "1",
    )
    with (
        tempfile.TemporaryDirectory(prefix="pp-") as folder,
        Deployment(Path(folder), *common, *flags, settings=SETTINGS | settings) as running,
    ):
        yield running
        running.wait_idle()


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: "-".join(map(str, world)))
def world(request: pytest.FixtureRequest) -> World:
    return request.param


@pytest.fixture(scope="module")
def deployment(world: World) -> Iterator[Deployment]:
    flags = ("--attention-backend", world.backend, "--block-size", str(world.block_size))
    with deployed(tiny_model(world.kind), *flags) as running:
        assert running.status().workers[0].attention_backend == world.backend
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random bytes: ids of the tiny models' vocabulary."""
    return random.Random(f"{length}/{seed}").choices(range(256), k=length)


@functools.cache
def original(kind: str) -> Any:
    return oracle.load(tiny_model(kind))


def assert_as_transformers(kind: str, questions: list[Question], outputs: list[list[int]]) -> None:
    for question, output in zip(questions, outputs, strict=True):
        verdict = oracle.verdict(original(kind), Case(question.prompt, output, question.sampling))
        assert output == verdict.choices, f"prompt of {len(question.prompt)} tokens, margin {verdict.margin:g}"


def test_tokens_are_those_of_transformers(world: World, deployment: Deployment) -> None:
    questions = [Question(prompt_of(length), GREEDY) for length in PROMPT_LENGTHS]
    answers = ask_all(deployment.endpoints["client"], questions)
    assert [len(answer.token_ids) for answer in answers] == [GREEDY.max_tokens] * len(questions)
    assert_as_transformers(world.kind, questions, tokens_of(answers))


def test_repeated_prompt_finds_all_its_full_blocks_but_the_last_token(world: World, deployment: Deployment) -> None:
    size = world.block_size
    lengths = [1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size]
    questions = [Question(prompt_of(length, seed=1), GREEDY) for length in lengths]
    first = ask_each(deployment.endpoints["client"], questions)
    again = ask_each(deployment.endpoints["client"], questions)
    assert tokens_of(first) == tokens_of(again)
    assert [answer.text for answer in first] == [answer.text for answer in again]
    assert [answer.usage.cached_tokens for answer in first] == [0] * len(lengths)
    assert [answer.usage.cached_tokens for answer in again] == [(length - 1) // size * size for length in lengths]
    assert_as_transformers(world.kind, questions, tokens_of(again))


def test_prefix_blocks_are_shared_only_under_the_same_salt(world: World, deployment: Deployment) -> None:
    question = [Question(prompt_of(4 * world.block_size + 1, seed=2), GREEDY)]
    endpoint = deployment.endpoints["client"]
    cached = [ask_all(endpoint, under(salt, question))[0].usage.cached_tokens for salt in ("a", "a", "b", "b")]
    assert cached == [0, 4 * world.block_size] * 2


def test_conversation_that_goes_on_finds_the_blocks_of_its_answer(world: World, deployment: Deployment) -> None:
    prompt = prompt_of(40, seed=3)
    [first] = ask_all(deployment.endpoints["client"], [Question(prompt, GREEDY)])
    longer = [*prompt, *first.token_ids, *prompt_of(5, seed=4)]
    [second] = ask_all(deployment.endpoints["client"], [Question(longer, GREEDY)])
    known = len(prompt) + GREEDY.max_tokens - 1  # the last token of an answer is never computed
    assert second.usage.cached_tokens == known // world.block_size * world.block_size
    assert_as_transformers(world.kind, [Question(longer, GREEDY)], [list(second.token_ids)])


def test_stop_token_ends_the_answer_and_is_its_last_token(deployment: Deployment) -> None:
    endpoint, prompt = deployment.endpoints["client"], prompt_of(21, seed=5)
    [whole] = ask_all(endpoint, [Question(prompt, GREEDY)])
    stop = whole.token_ids[6]
    until = whole.token_ids.index(stop) + 1
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    [stopped] = ask_all(endpoint, [Question(prompt, sampling)])
    assert stopped.token_ids == whole.token_ids[:until]
    assert stopped.finish_reason == "stop"
    assert stopped.usage.completion_tokens == until


def test_end_of_sequence_ends_the_answer_unless_ignored(deployment: Deployment) -> None:
    """At this temperature all 259 tokens are about equally likely, so some of 1,600 draws is the end of sequence."""
    [eos] = deployment.client.server_info().eos_token_ids
    ignoring = [SamplingParams(max_tokens=40, temperature=1e4, seed=seed, ignore_eos=True) for seed in range(40)]
    minding = [SamplingParams(max_tokens=40, temperature=1e4, seed=seed) for seed in range(40)]
    whole, ended = (
        ask_all(deployment.endpoints["client"], [Question(prompt_of(9, seed=100), sampling) for sampling in series])
        for series in (ignoring, minding)
    )
    assert any(eos in answer.token_ids[:-1] for answer in whole)
    for long, short in zip(whole, ended, strict=True):
        until = long.token_ids.index(eos) + 1 if eos in long.token_ids else 40
        assert short.token_ids == long.token_ids[:until]
        assert short.finish_reason == ("stop" if eos in long.token_ids else "length")


def test_one_token_may_be_all_that_is_asked_for(world: World, deployment: Deployment) -> None:
    one = SamplingParams(max_tokens=1, temperature=0)
    questions = [Question(prompt_of(length, seed=6), one) for length in (1, 8, 16, 17, 100)]
    answers = ask_all(deployment.endpoints["client"], questions)
    assert all(len(answer.token_ids) == answer.usage.completion_tokens == 1 for answer in answers)
    assert_as_transformers(world.kind, questions, tokens_of(answers))


@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_tokens_of_requests_preempted_again_and_again_are_those_of_transformers(kind: str) -> None:
    """Two cache groups included: a pool that holds three or four of the thirty requests."""
    questions = [Question(prompt_of(20 + length, seed=length), GREEDY) for length in range(30)]
    blocks_of_8 = 30 if kind == "llama" else 50
    kv_memory = str(blocks_of_8 * 8 * 512)  # K and V of 2 layers of 2 heads of 16 float32: 512 bytes a slot
    with deployed(tiny_model(kind), "--block-size", "8", "--kv-memory", kv_memory) as tiny:
        answers = ask_all(tiny.endpoints["client"], questions)
        assert_as_transformers(kind, questions, tokens_of(answers))
        assert tiny.preemptions() >= 5, "how many depends on which requests meet"


def test_without_prefix_caching_nothing_is_cached_and_the_tokens_are_the_same() -> None:
    """All layers of this model look through a window: its one group is a window group."""
    questions = [Question(prompt_of(length, seed=8), GREEDY) for length in (1, 16, 33, 64, 129)]
    with deployed(tiny_model("mistral"), "--no-enable-prefix-caching") as running:
        first = ask_each(running.endpoints["client"], questions)
        again = ask_each(running.endpoints["client"], questions)
        assert [answer.usage.cached_tokens for answer in first + again] == [0] * 10
        assert tokens_of(first) == tokens_of(again)
        assert_as_transformers("mistral", questions, tokens_of(first))
        assert sum(replica.cached_blocks for replica in running.status().replicas) == 0


def test_dummy_weights_serve_a_folder_without_weights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in tiny_model("llama").iterdir():
            if path.suffix == ".json":
                shutil.copy(path, folder)
        with deployed(Path(folder), "--load-format", "dummy", "--seed", "3") as running:
            questions = [Question(prompt_of(20), GREEDY)] * 2
            first, second = ask_all(running.endpoints["client"], questions)
            assert len(first.token_ids) == GREEDY.max_tokens
            assert first.token_ids == second.token_ids


def test_gguf_file_answers_like_the_model_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [Question(prompt_of(length, seed=9), GREEDY) for length in (1, 30, 70)]
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("PAGEPLANE_CACHE", f"{folder}/cache")
        file = write_gguf(tiny_model("llama"), Path(folder) / "tiny.gguf")
        with deployed(file) as running:
            answers = ask_all(running.endpoints["client"], questions)
    assert_as_transformers("llama", questions, tokens_of(answers))
