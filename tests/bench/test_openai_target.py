"""The whole command against a small OpenAI server over real HTTP: what it sends, and what it makes of the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main


class OpenAIServer(ThreadingHTTPServer):
    """Streams the tokens it is asked for. Prompts in `break_off` end early, those in `refuse` get a 400."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.break_off: set[int] = set()
        self.refuse: set[int] = set()
        self.names_tokens = True  # as vLLM does, when asked
        self.tokenized: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "m"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.server.tokenized.append(body["prompt"])
            assert body["content"] == body["prompt"] and not body["add_special"] and not body["add_special_tokens"]
            self._whole(200, {"tokens": [7] * len(body["prompt"])})
            return
        self.server.bodies.append(body)
        number = len(self.server.bodies)
        if number in self.server.refuse:
            self._whole(400, {"error": {"message": "too long for me"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for count in range(1, body["max_tokens"] + 1):
            choice = {"index": 0, "text": "x", "finish_reason": None}
            if body.get("return_token_ids") and self.server.names_tokens:
                choice["token_ids"] = [100 + count]
            self._event({"choices": [choice], "usage": {"completion_tokens": count}})
            if number in self.server.break_off:
                self.close_connection = True
                return
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


LOAD = ("--num-prompts", "6", "--input-len", "5", "--output-len", "4", "--concurrency", "3", "--repeat", "2")


def test_two_servers_are_measured_side_by_side(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "result.json"
    targets = ("--target", f"openai={server.url},name=a", "--target", f"openai={server.url}/v1,model=other,name=b")
    assert main(["serve", *targets, *LOAD, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [target["name"] for target in result["targets"]] == ["a", "b"]
    for target in result["targets"]:
        assert [run["output_tokens"] for run in target["runs"]] == [24, 24]
        assert [run["failed"] for run in [target["warmup"], *target["runs"]]] == [0, 0, 0]
        assert target["summary"]["output_tokens_per_s"]["median"] > 0
    assert len(result["comparisons"][0]["metrics"]["ttft_p50_s"]["rounds"]) == 2
    assert "output tokens/s" in capsys.readouterr().out

    assert [body["model"] for body in server.bodies] == (["m"] * 6 + ["other"] * 6) * 3
    body = server.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (4, True, 0.0, True)
    assert len(body["prompt"]) == 5 and all(isinstance(token, int) for token in body["prompt"])


@pytest.mark.parametrize(("names_tokens", "answer"), [(True, [101, 102, 103, 104]), (False, [7, 7, 7, 7])])
def test_a_conversation_goes_on_with_what_the_server_said(server: OpenAIServer, names_tokens: bool, answer: list[int]):
    """Its token ids, or without them those that its tokenizer has for its text."""
    server.names_tokens = names_tokens
    flags = ("--workload", "multi-turn", "--num-prompts", "1", "--turns", "2", "--turn-len", "3", "--repeat", "1")
    lengths = ("--input-len", "5", "--output-len", "4")
    assert main(["serve", "--target", f"openai={server.url}", *flags, *lengths, "--no-warmup"]) == 0
    first, second = (body["prompt"] for body in server.bodies)
    assert second[:9] == first + answer and len(second) == 12
    assert server.tokenized == ([] if names_tokens else ["xxxx"])
    assert ["return_token_ids" in body for body in server.bodies] == [True, False]  # the last answer isn't needed


def test_failures_are_counted_by_reason_and_set_the_exit_code(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.refuse, server.break_off = {1}, {2, 3}
    out = tmp_path / "result.json"
    flags = ("--target", f"openai={server.url}", *LOAD, "--repeat", "1", "--no-warmup", "--json", str(out))
    assert main(["serve", *flags]) == 1
    (run,) = json.loads(out.read_text())["targets"][0]["runs"]
    assert (run["completed"], run["failed"], run["output_tokens"]) == (3, 3, 12)
    assert sorted(run["errors"].values()) == [1, 2]
    assert any("too long for me" in reason for reason in run["errors"])
    assert any("without [DONE]" in reason for reason in run["errors"])
    assert "too long for me" in capsys.readouterr().out


def test_an_absent_server_or_model_is_named(server: OpenAIServer, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--target", f"openai={server.url},model=none", *LOAD]) == 2
    assert "'none'" in capsys.readouterr().err
    assert main(["serve", "--target", "openai=http://127.0.0.1:9", *LOAD]) == 2
    assert "does not answer" in capsys.readouterr().err
