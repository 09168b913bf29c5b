"""docs/http.md: its examples run, its tables are complete, its limits are those of the code."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import httpx
import pytest

from gateway import connection, middleware, schema
from gateway.app import build
from gateway.refused import Unsupported
from protocol.config import EngineConfig
from tests.tiny_model import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "http.md").read_text()
HERE = "http://127.0.0.1:8000"
CURLS = re.findall(r"^curl .*$", TEXT + (ROOT / "README.md").read_text(), re.M)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)


def curl(command: str, url: str) -> httpx.Response:
    """What the command does, without needing curl."""
    words = shlex.split(command.replace(HERE, url))[1:]
    headers, content, target = {}, None, ""
    while words:
        match word := words.pop(0):
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                content = words.pop(0)
            case "-N" | "-s":
                continue
            case _:
                assert not word.startswith("-") and not target, word
                target = word
    return httpx.request("GET" if content is None else "POST", target, headers=headers, content=content, timeout=30)


def test_there_are_examples_of_both_kinds() -> None:
    assert len(CURLS) >= 5 and len(PROGRAMS) >= 3


@pytest.mark.parametrize("command", CURLS)
def test_the_commands_work(url: str, command: str) -> None:
    answer = curl(command, url)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.split("client.")[-1].split("(")[0])
def test_the_programs_work(url: str, program: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace(HERE, url), "docs/http.md", "exec"), {})
    assert printed.getvalue().strip()


def rows(heading: str) -> list[str]:
    """First cells of the table below its head row."""
    table = TEXT[TEXT.index(heading) :].split("\n\n")[0]
    return [line.split("|")[1].strip().strip("`") for line in table.splitlines()[2:]]


def test_every_parameter_stands_in_its_table() -> None:
    fields = set(schema.ChatCompletionRequest.model_fields) | set(schema.CompletionRequest.model_fields)
    refused = set(Unsupported.model_fields) & fields
    assert set(rows("| parameter |")) == fields - refused
    assert set(rows("| refused |")) == refused
    for line in re.findall(r"^\| `(\w+)` \| (both|chat|completions) \|", TEXT, re.M):
        chat, text = (line[0] in kind.model_fields for kind in (schema.ChatCompletionRequest, schema.CompletionRequest))
        assert line[1] == {(True, True): "both", (True, False): "chat", (False, True): "completions"}[chat, text], line


def test_every_endpoint_stands_in_its_table() -> None:
    app = build(EngineConfig(model=str(tiny_model()), model_name="tiny"), Path("/nonexistent"))
    there = {(method.upper(), path) for path, found in app.openapi()["paths"].items() for method in found}
    told = set(re.findall(r"`(GET|POST) (/[\w/{}.]*)`", TEXT))
    assert there <= told
    assert {path for _, path in told - there} <= {"/", "/docs", "/openapi.json"}


def test_the_limits_are_those_of_the_code() -> None:
    limits = dict(
        line.strip("| ").split(" | ")
        for line in TEXT[TEXT.index("| what | limit |") :].split("\n\n")[0].splitlines()[2:]
    )
    config = EngineConfig()
    assert limits == {
        "body of a request; of all requests being served": (
            f"{config.max_request_bytes >> 20} MiB (`max_request_bytes`); {middleware.MAX_BODY_BYTES_IN_ALL >> 20} MiB"
        ),
        "head of a request": f"{connection.MAX_HEAD_BYTES >> 10} KiB, complete within {connection.HEAD_TIMEOUT_S:g} s",
        "a body": f"complete within {middleware.BODY_TIMEOUT_S:g} s of its head",
        "prompts × `n` of a request": f"{schema.MAX_CHOICES:,}",
        "messages, and parts of a message": f"{schema.MAX_MESSAGES:,}",
        "waiting requests": f"{config.max_waiting:,} (`max_waiting`)",
        "kept for a client that does not read": (
            f"{connection.SEND_BUFFER_BYTES >> 10} KiB in the kernel, 64 KiB and its token ids here"
        ),
        "open connections": "65,536, or what the system allows",
    }
