"""Servers that the benchmark starts are waited for, and leave nothing behind."""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from bench.processes import ServerProcess, StartFailed, answers, start_command


def server_line(port: int, body: str) -> str:
    return shlex.join([sys.executable, "-c", textwrap.dedent(body), str(port)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HTTP_WITH_A_CHILD_THAT_IGNORES_SIGTERM = """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    print(child.pid, flush=True)
    http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def test_a_started_server_is_ready_and_stops_with_its_whole_group(tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    command = server_line(port, HTTP_WITH_A_CHILD_THAT_IGNORES_SIGTERM)
    server, took = start_command(command, url, tmp_path / "log", 60)
    with server:
        assert answers(url)
        assert took > 0
        child = os.pidfd_open(int(server.log.read_text().split()[0]))
        with pytest.raises(ValueError, match="answers already"):
            start_command(command, url, tmp_path / "second", 60)
    assert not answers(url)
    assert select.select([child], [], [], 10)[0], "the child of the server lives on"
    os.close(child)
    server.stop()  # once more is harmless


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_last_words(tmp_path: Path):
    command = shlex.join([sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"])
    with pytest.raises(StartFailed, match=r"(?s)code 3.*no such model"):
        start_command(command, f"http://127.0.0.1:{free_port()}/", tmp_path / "log", 60)


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path):
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    with ServerProcess(argv, tmp_path / "log") as server, pytest.raises(StartFailed, match="not ready after"):
        server.wait_until(lambda: False, 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_commands_are_split_like_a_shell_would_and_run_without_one(tmp_path: Path):
    out = tmp_path / "argv.json"
    code = "import json, sys; open(sys.argv[1], 'w').write(json.dumps(sys.argv[2:]))"
    command = f"env A=B {shlex.join([sys.executable, '-c', code, str(out)])} 'two words' $HOME"
    with pytest.raises(StartFailed):
        start_command(command, f"http://127.0.0.1:{free_port()}/", tmp_path / "log", 60)
    assert json.loads(out.read_text()) == ["two words", "$HOME"]
