"""The synchronous client is the asyncio one without async."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_server import STATUS, ScriptedServer

from client import Client, Completion, RequestRejected, SamplingParams, ServerUnavailable
from protocol import messages as m

LONG = SamplingParams(max_tokens=1000)


def test_answer_text_status_and_info(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        assert Completion.join(client.generate("hi", LONG)).text == "hi"
        assert client.generate_text([104, 105], LONG) == "hi"
        assert client.status() == STATUS
        assert client.server_info() == server.info


def test_leaving_the_loop_early_aborts(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        server.accept(identity, message)
        server.tokens(message.request_id, 0, [120])
        return True

    server.handler = handler
    with Client(server.endpoint) as client:
        for chunk in client.generate([1], LONG, request_id="left"):
            assert chunk.text == "x"
            break
        assert server.wait_for(m.Abort) == [m.Abort("left")]


def test_errors_are_those_of_the_asyncio_client(server: ScriptedServer) -> None:
    with Client(server.endpoint) as client:
        with pytest.raises(RequestRejected):
            client.generate_text([2**40], LONG)
        assert client.generate_text([104], LONG) == "h"


def test_threads_may_share_a_client(server: ScriptedServer) -> None:
    answers: dict[int, str] = {}
    with Client(server.endpoint) as client:

        def ask(n: int) -> None:
            answers[n] = client.generate_text([97 + n] * 20, LONG)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == {n: chr(97 + n) * 20 for n in range(8)}


def test_no_server_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "run"))
    before = threading.active_count()
    with pytest.raises(ServerUnavailable):
        Client()
    assert threading.active_count() == before


def test_close_may_be_called_twice(server: ScriptedServer) -> None:
    client = Client(server.endpoint)
    client.close()
    client.close()
