"""Triton kernels in whole deployments: interpreted on the CPU, with the tokens of `transformers`, a kill included."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from protocol.messages import SamplingParams
from tests.integration import oracle
from tests.integration.asking import Question, ask_all, tokens_of
from tests.integration.deployment import Deployment
from tests.integration.oracle import Case
from tests.tiny_model import tiny_model

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
PROMPT_LENGTHS = (1, 8, 9, 40)


def test_a_killed_worker_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cache groups (full attention and a sliding window), two workers, one of them killed midway.

    The workers run as on a GPU, with two steps on their way and decode padded to the sizes that would be recorded.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = tiny_model("mixed")
    questions = [Question([(31 * i + 7 * j) % 256 for j in range(n)], GREEDY) for i, n in enumerate(PROMPT_LENGTHS)]
    flags = (
        "--model", str(model), "--workers", "2", "--dtype", "float32", "--kv-memory", "16MiB",
        "--attention-backend", "triton", "--block-size", "8", "--threads-per-worker", "1",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, Deployment(Path(folder), *flags) as server:
        assert {worker.attention_backend for worker in server.status().workers} == {"triton"}
        killed: list[int] = []

        def kill_midway(total: int) -> None:
            if not killed and total >= len(questions) * NUM_TOKENS // 2:
                killed.append(server.kill("worker-0", signal.SIGKILL))

        answers = ask_all(server.endpoints["client"], questions, on_tokens=kill_midway)
        assert killed
        server.wait_in_service(["worker-0", "worker-1"], not_pids=killed)
        server.wait_idle()
    cases = [Case(q.prompt, output, q.sampling) for q, output in zip(questions, tokens_of(answers), strict=True)]
    for case, verdict in zip(cases, oracle.judge(model, cases), strict=True):
        assert case.output == verdict.choices, f"prompt of {len(case.prompt)} tokens, margin {verdict.margin:g}"
