"""Whole deployments on a GPU: the tokens of `transformers`, with a worker killed, with recorded steps and without."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.messages import SamplingParams
from tests.integration import oracle
from tests.integration.asking import Question, ask_all, tokens_of, under
from tests.integration.deployment import Deployment
from tests.integration.oracle import Case
from tests.tiny_model import tiny_model

NUM_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 300, 700)


@contextmanager
def deployed(kind: str, *flags: str, workers: int = 1, dtype: str = "float32") -> Iterator[Deployment]:
    """Tiny workers on the GPU, in memory of their own; at the end every block must be free again."""
    common = (
        "--model", str(tiny_model(kind)), "--workers", str(workers), "--device", "cuda", "--dtype", dtype,
        "--kv-memory", "64MiB", "--max-num-batched-tokens", "256",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, Deployment(Path(folder), *common, *flags) as server:
        assert {worker.attention_backend for worker in server.status().workers} == {"triton"}
        yield server
        server.wait_idle()


def questions(sampling: SamplingParams = GREEDY) -> list[Question]:
    return [Question([(31 * i + 7 * j) % 256 for j in range(n)], sampling) for i, n in enumerate(PROMPT_LENGTHS)]


@pytest.mark.parametrize("kind", ["llama", "mixed", "qwen3"])
def test_a_killed_worker_changes_no_token(kind: str) -> None:
    """mixed: two cache groups, one of them with a sliding window; qwen3: norms of heads."""
    asked = questions()
    with deployed(kind, workers=2) as server:
        killed: list[int] = []

        def kill_midway(total: int) -> None:
            if not killed and total >= len(asked) * NUM_TOKENS // 2:
                killed.append(server.kill("worker-0", signal.SIGKILL))

        answers = ask_all(server.endpoints["client"], asked, on_tokens=kill_midway)
        assert killed
        server.wait_in_service(["worker-0", "worker-1"], not_pids=killed, timeout_s=120)
    cases = [Case(q.prompt, output, q.sampling) for q, output in zip(asked, tokens_of(answers), strict=True)]
    for case, verdict in zip(cases, oracle.judge(tiny_model(kind), cases), strict=True):
        assert case.output == verdict.choices, f"prompt of {len(case.prompt)} tokens, margin {verdict.margin:g}"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_quantised_cache_says_for_a_while_what_the_exact_one_says(kv_cache_dtype: str) -> None:
    """Answers part where rounding of K and V turns a near tie around: with fp8 on the CPU after 11 to 17 of 40 tokens
    on average. A wrong scale would part them at once. A killed worker's requests go on here, too."""
    asked = questions()
    with deployed("llama") as server:
        exact = tokens_of(ask_all(server.endpoints["client"], asked))
    with deployed("llama", "--kv-cache-dtype", kv_cache_dtype) as server:
        quantised = tokens_of(ask_all(server.endpoints["client"], asked))
        killed: list[int] = []
        answers = ask_all(
            server.endpoints["client"],
            under("again", asked),
            on_tokens=lambda total: None if killed or total < 100 else killed.append(server.kill("worker-0")),
        )
    assert killed
    assert [len(tokens) for tokens in tokens_of(answers)] == [NUM_TOKENS] * len(asked)
    agreeing = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), NUM_TOKENS)
        for one, other in zip(exact, quantised, strict=True)
    ]
    assert sum(agreeing) / len(agreeing) >= 4, agreeing


def test_recorded_steps_give_the_tokens_of_launched_ones() -> None:
    """Greedy and drawn; the second time around the prompts are found in the prefix cache. In float32: a padded batch
    may be multiplied in another order, and what that does to bfloat16 can turn a near tie around."""
    asked = questions() + questions(SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, ignore_eos=True))
    tokens = []
    for flags in ((), ("--enforce-eager",)):
        with deployed("mixed", *flags) as server:
            tokens += [tokens_of(ask_all(server.endpoints["client"], asked)) for _ in range(2)]
    assert all(other == tokens[0] for other in tokens[1:])


def test_nothing_is_compiled_once_workers_are_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton writes every variant that it compiles into its cache folder: after READY none may come."""
    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))

    def variants() -> set[Path]:
        return set(cache.glob("**/*.cubin"))

    draw = random.Random(0)
    with deployed("mixed", "--max-num-seqs", "48") as server:
        warm = variants()
        assert warm
        for round_ in range(4):  # batches of all sizes, lengths of all kinds, all ways to sample
            asked = [
                Question(
                    [draw.randrange(256) for _ in range(draw.choice([1, 3, 16, 17, 50, 255, 256, 257, 600]))],
                    SamplingParams(
                        max_tokens=draw.randrange(1, 60), temperature=draw.choice([0.0, 0.8]),
                        top_k=draw.choice([0, 5]), top_p=draw.choice([1.0, 0.9]), seed=draw.randrange(9),
                        ignore_eos=True,
                    ),
                )
                for _ in range((1, 7, 48, 60)[round_])
            ]  # fmt: skip
            ask_all(server.endpoints["client"], under(str(round_), asked))
        assert not variants() - warm
