"""`python -m client` as people run it: a real process, a real socket, a scripted server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from protocol import messages as m


def client(server: ScriptedServer | None, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    if "input" in options:
        del options["stdin"]
    return subprocess.run(command(server, *arguments), capture_output=True, text=True, timeout=60, **options)


def command(server: ScriptedServer | None, *arguments: str) -> list[str]:
    words = list(arguments)
    if server is not None:
        place = 1 if words and words[0] in ("chat", "batch", "status") else 0
        words[place:place] = ["--endpoint", server.endpoint]
    return [sys.executable, "-m", "client", *words]


def hold(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
    """Send a line and no more; an abort ends it."""
    if isinstance(message, m.Submit):
        server.accept(identity, message)
        server.tokens(message.request_id, 0, list(b"begun\n"))
        return True
    if isinstance(message, m.Abort):
        server.finish(message.request_id, 6, "abort")
        return True
    return False


def test_prompt_is_asked_with_the_chat_template_greedily(server: ScriptedServer) -> None:
    done = client(server, "Who?", "--usage", "--max-tokens", "99")
    assert (done.returncode, done.stdout) == (0, "[user]Who?\n[assistant]\n")
    assert done.stderr == "23 prompt tokens (0 cached), 23 generated, finish reason stop\n"
    (submit,) = server.wait_for(m.Submit)
    assert isinstance(submit, m.Submit)
    assert submit.sampling == m.SamplingParams(max_tokens=99, temperature=0.0)


def test_every_sampling_flag_is_sent(server: ScriptedServer) -> None:
    flags = "--temperature .5 --top-k 4 --top-p .9 --min-p .1 --seed 7 --stop-token 3 --stop-token 4 --ignore-eos"
    assert client(server, "--raw", "x", *flags.split()).returncode == 0
    (submit,) = server.wait_for(m.Submit)
    assert isinstance(submit, m.Submit)
    assert submit.sampling == m.SamplingParams(256, 0.5, 4, 0.9, 0.1, 7, (3, 4), True)


def test_raw_prompt_is_sent_as_it_is(server: ScriptedServer) -> None:
    assert client(server, "--raw", "ab").stdout == "ab\n"


def test_system_message_comes_first(server: ScriptedServer) -> None:
    assert client(server, "Q", "--system", "S").stdout == "[system]S\n[user]Q\n[assistant]\n"


def test_word_that_is_a_command_can_be_asked(server: ScriptedServer) -> None:
    assert client(server, "--raw", "-p", "status").stdout == "status\n"


def test_prompt_comes_from_a_pipe(server: ScriptedServer) -> None:
    assert client(server, "--raw", input="from a pipe").stdout == "from a pipe\n"
    assert client(server, "--raw", "-", input="from a pipe").stdout == "from a pipe\n"


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--raw", ""], 1, "error: the prompt is empty"),
        (["--raw", "--system", "s", "x"], 1, "error: a system message needs"),
        (["--bogus", "x"], 2, "unrecognized arguments: --bogus"),
        (["--max-tokens", "many", "x"], 2, "invalid int value: 'many'"),
        (["-p", "x", "y"], 2, "give the prompt once"),
        (["--seed", str(2**64), "x"], 1, "error: sampling parameters"),
        (["batch", "missing.jsonl", "--output", "o"], 1, "error: [Errno 2] No such file or directory: 'missing.jsonl'"),
        (["batch", "x", "--output", "o", "--concurrency", "0"], 2, "--concurrency must be at least 1"),
    ],
)
def test_wrong_use_is_one_clear_line(server: ScriptedServer, arguments: list[str], code: int, complaint: str) -> None:
    done = client(server, *arguments)
    assert done.returncode == code
    assert complaint in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_rejection_is_one_line(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        server.send(identity, m.Rejected(message.request_id, "too_long", "the prompt has 9999 tokens", "prompt"))
        return True

    server.handler = handler
    done = client(server, "x")
    assert (done.returncode, done.stderr) == (1, "error: the prompt has 9999 tokens (too_long, prompt)\n")


@pytest.mark.parametrize("arguments", [["x"], ["chat"], ["status"]])
def test_without_a_server_it_says_how_to_start_one(tmp_path: Path, arguments: list[str]) -> None:
    done = client(None, *arguments, env={**os.environ, "PAGEPLANE_RUNTIME": str(tmp_path / "run")})
    assert done.returncode == 1
    assert done.stderr.startswith("error: no running server found")
    assert done.stderr.endswith("start one with: python launch.py --workers 2\n")


def test_ctrl_c_aborts_the_request_and_leaves_no_traceback(server: ScriptedServer) -> None:
    server.handler = hold
    process = subprocess.Popen(command(server, "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    server.wait_for(m.Abort)
    assert process.wait(10) == 130
    assert process.stderr.read() == "\n"


def test_reader_that_goes_away_ends_it_quietly(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        server.accept(identity, message)
        server.tokens(message.request_id, 0, list(b"begun\n"))
        return True

    server.handler = handler
    process = subprocess.Popen(command(server, "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "begun\n"
    process.stdout.close()
    (request_id,) = server.handles
    server.do(lambda: server.tokens(request_id, 6, list(b"more\n")))
    assert process.wait(10) == 141
    assert process.stderr.read() == ""


def test_chat_remembers_resets_and_quits(server: ScriptedServer) -> None:
    flags = ["chat", "--system", "S", "--max-tokens", "100"]
    done = client(server, *flags, input="one\n\ntwo\n/reset\nthree\n/quit\nfour\n")
    assert done.returncode == 0
    first = "[system]S\n[user]one\n[assistant]"
    second = f"{first}{first}\n[user]two\n[assistant]"
    third = "[system]S\n[user]three\n[assistant]"
    assert done.stdout == f"{first}\n{second}\nThe conversation starts over.\n{third}\n"


def test_ctrl_c_in_chat_ends_the_answer_only(server: ScriptedServer) -> None:
    server.handler = hold
    process = subprocess.Popen(
        command(server, "chat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout and process.stderr
    for turn in range(1, 3):
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        server.wait_for(m.Abort, turn)
        assert process.stdout.readline() == " …\n"
    process.stdin.close()
    assert process.wait(10) == 0
    assert process.stderr.read() == ""
    (_, second) = server.wait_for(m.Submit, 2)
    assert isinstance(second, m.Submit)
    prompt = bytes(token for token in memoryview(second.token_ids).cast("i") if token < 256).decode()
    assert prompt == "[user]go on\n[assistant]begun\n\n[user]go on\n[assistant]"


def test_status_once_shows_workers_and_replicas(server: ScriptedServer) -> None:
    done = client(server, "status", "--once")
    assert done.returncode == 0
    for part in ("scripted", "up 0:01:01", "worker-0", "4242", "40 / 100 (40%)", "25.0%"):
        assert part in done.stdout


def test_status_as_json_has_field_names(server: ScriptedServer) -> None:
    status = json.loads(client(server, "status", "--json").stdout)
    assert status["model"] == "scripted"
    assert status["workers"][0]["worker_id"] == "worker-0"
    assert status["replicas"][0]["free_blocks"] == 60


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_batch_answers_every_line_in_order(server: ScriptedServer, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        {"custom_id": "a", "prompt": "hé", "model": "scripted", "seed": None},
        {"custom_id": "b", "prompt": "x", "wishes": 1},
        "not json",
        "",
        {"messages": [{"role": "user", "content": "q"}], "max_tokens": 50, "temperature": 0},
        {"custom_id": 5, "prompt": [104, 105], "max_tokens": 1},
        {"custom_id": "c", "messages": [{"role": "tool", "content": ""}]},
    )
    output = tmp_path / "out.jsonl"
    done = client(server, "batch", str(source), "--output", str(output), "--concurrency", "3")
    assert (done.returncode, done.stderr) == (0, "3 answered, 3 failed\n")
    good, unknown, broken, chat, ids, refused = read_lines(output)
    usage = {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, "cached_tokens": 0}
    expected = {"custom_id": "a", "text": "hé", "token_ids": [256, 104, 195, 169], "finish_reason": "stop"}
    assert good == {**expected, "usage": usage}
    error = {"code": "invalid_request", "message": "unknown field 'wishes'", "param": "wishes", "line": 2}
    assert unknown == {"custom_id": "b", "error": error}
    assert broken["error"]["line"] == 3 and "no valid JSON" in broken["error"]["message"]
    assert chat["text"] == "[user]q\n[assistant]"
    assert (ids["custom_id"], ids["text"]) == (5, "h")
    assert "no tools here" in refused["error"]["message"]
    sampled = {submit.sampling.temperature for submit in server.wait_for(m.Submit) if isinstance(submit, m.Submit)}
    assert sampled == {0.0, 1.0}


def test_batch_keeps_the_order_when_answers_come_in_another(server: ScriptedServer, tmp_path: Path) -> None:
    """All are held until the last has been asked, then answered from the last to the first."""
    held: list[tuple[bytes, m.Submit]] = []

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        held.append((identity, message))
        if len(held) == 8:
            for identity, submit in reversed(held):
                server._default(identity, submit)
        return True

    server.handler = handler
    source = write_lines(tmp_path / "in.jsonl", *({"prompt": [97 + n]} for n in range(8)))
    assert client(server, "batch", str(source), "--output", str(tmp_path / "out"), "--concurrency", "8").returncode == 0
    assert "".join(line["text"] for line in read_lines(tmp_path / "out")) == "abcdefgh"


def test_batch_never_has_more_than_its_concurrency_under_way(server: ScriptedServer, tmp_path: Path) -> None:
    most = 0

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        nonlocal most
        if isinstance(message, m.Submit):
            server.accept(identity, message)
            most = max(most, len(server.handles))
            server.tokens(message.request_id, 0, [97])
            server.finish(message.request_id, 1)
            return True
        return False

    server.handler = handler
    source = write_lines(tmp_path / "in.jsonl", *({"prompt": "x"} for _ in range(30)))
    assert client(server, "batch", str(source), "--output", str(tmp_path / "out"), "--concurrency", "2").returncode == 0
    assert len(read_lines(tmp_path / "out")) == 30 and most <= 2


def test_batch_does_not_overwrite_its_input(server: ScriptedServer, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    done = client(server, "batch", str(source), "--output", str(source))
    assert done.returncode == 2 and "another file" in done.stderr
    assert read_lines(source) == [{"prompt": "x"}]
