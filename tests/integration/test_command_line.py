"""What the README shows, as a user types it: one deployment of the default model, and `python -m client`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment import Deployment


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="pp-") as folder, Deployment(Path(folder), "--workers", "2") as running:
        yield running


def test_the_capital_of_france_is_paris(deployment: Deployment) -> None:
    done = deployment.run_client("What is the capital of France?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")


def test_batch_answers_every_line_in_order_with_usage(deployment: Deployment) -> None:
    lines: list[dict[str, object]] = []
    for index in range(20):
        question = f"What is {index} plus {index}?"
        line: dict[str, object] = {"custom_id": f"line-{index}", "max_tokens": 1 + index % 7, "temperature": 0}
        lines.append(
            line | ({"messages": [{"role": "user", "content": question}]} if index % 2 else {"prompt": question})
        )
    source, target = deployment.folder / "in.jsonl", deployment.folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = deployment.run_client("batch", str(source), "--output", str(target), "--concurrency", "8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "20 answered, 0 failed\n")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    tokenizer = deployment.client.tokenizer()
    for line, answer in zip(lines, answers, strict=True):
        usage = answer["usage"]
        if "prompt" in line:
            assert usage["prompt_tokens"] == len(tokenizer.encode(str(line["prompt"])))
        assert usage["completion_tokens"] == len(answer["token_ids"]) <= int(str(line["max_tokens"]))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
        assert answer["finish_reason"] in ("length", "stop")


def test_status_as_json_names_every_worker_and_counts_the_blocks(deployment: Deployment) -> None:
    deployment.wait_idle()
    done = deployment.run_client("status", "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert status["model"] == "SmolLM2-135M-Instruct"
    assert {worker["worker_id"]: worker["pid"] for worker in status["workers"]} == {
        name: pid for name, pid in deployment.pids.items() if name != "scheduler"
    }
    assert {worker["state"] for worker in status["workers"]} == {"ready"}
    for replica in status["replicas"]:
        assert replica["free_blocks"] == replica["total_blocks"] > 0


def test_status_as_a_table_shows_the_workers(deployment: Deployment) -> None:
    done = deployment.run_client("status", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    for name, pid in deployment.pids.items():
        if name != "scheduler":
            assert name in done.stdout and str(pid) in done.stdout


def test_prompt_that_cannot_be_served_is_refused_by_name_and_the_next_one_works(deployment: Deployment) -> None:
    refused = deployment.run_client("Hello", "--max-tokens", "0")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: ") and "max_tokens" in refused.stderr
    assert deployment.run_client("Hello", "--max-tokens", "1").returncode == 0


def test_client_without_a_server_says_how_to_start_one(deployment: Deployment) -> None:
    with tempfile.TemporaryDirectory(prefix="pp-") as elsewhere:
        done = deployment.run_client("Hello", PAGEPLANE_RUNTIME=elsewhere)
    assert done.returncode == 1
    assert "python launch.py" in done.stderr
