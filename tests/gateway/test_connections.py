"""What a client may hold without asking for anything is bounded, and what is no request is told so."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import connection, middleware
from protocol import messages as m
from tests.gateway.in_process import serve
from tests.gateway.wire import SOON_S, TEXT, connect, read_all, request

GOOD: dict[str, Any] = {"prompt": "abc", "max_tokens": 3}


def answers(raw: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of each answer of a connection, one after the other; all have a length."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines[1:]}
        size = int(headers["content-length"])
        found.append((int(lines[0].split()[1]), json.loads(rest[:size])))
        raw = rest[size:]
    return found


def the_answer(url: str, *sent: bytes) -> tuple[int, str]:
    """Status and message of the one answer to what is sent, after which the server hangs up."""
    with connect(url) as client:
        for piece in sent:
            client.sendall(piece)
        ((status, body),) = answers(read_all(client))
        return status, body["error"]["message"]


def test_what_is_no_http_gets_a_400_in_the_usual_shape(tmp_path: Path) -> None:
    with serve(tmp_path, None) as (url, _):
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            assert the_answer(url, junk) == (400, "this is no valid HTTP/1.1 request")
        assert httpx.post(url + TEXT, json=GOOD).status_code == 200


def test_a_head_without_end_is_cut_off(tmp_path: Path) -> None:
    with serve(tmp_path, None) as (url, _):
        for start in (b"GET / HTTP/1.1\r\n", b"GET /"):
            with connect(url) as client:
                client.sendall(start)
                with pytest.raises((ConnectionError, AssertionError)):
                    for _ in range(1000):
                        client.sendall(b"x: " + b"y" * 997 + b"\r\n" if b"\r" in start else b"y" * 1000)
                    raise AssertionError("a megabyte was taken")
        assert httpx.get(url + "/version", headers={"X-Long": "y" * 30_000}).status_code == 200


def test_a_head_or_a_body_that_comes_too_slowly_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.2)
    with serve(tmp_path, None) as (url, _):
        assert the_answer(url) == (408, "the head of the request was not complete within 0.2 s")
        assert the_answer(url, b"POST / HTTP/1.1\r\nHost: local")[0] == 408
        whole = request(TEXT, GOOD)
        with connect(url) as client:
            client.sendall(whole[:-5])
            ((status, body),) = answers(read_all(client))
        assert (status, body["error"]["message"]) == (408, "the body was not complete within 0.2 s")
        with connect(url) as client:  # a connection that is kept has a limit of its own
            client.sendall(whole)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert the_answer(url)[0] == 408, "a head begun when the answer came would be given up by now"
            client.sendall(whole)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_large_bodies_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES_IN_ALL", 1)  # so the limit is that of one body
    with serve(tmp_path, None, max_request_bytes=1 << 20) as (url, _):
        large = request(TEXT, {**GOOD, "user": "x" * 900_000})
        with connect(url) as first:
            first.sendall(large[:-1])
            with httpx.Client(base_url=url) as http:
                deadline = time.monotonic() + SOON_S
                while (answer := http.post(TEXT, json={**GOOD, "user": "x" * 900_000})).status_code == 200:
                    assert time.monotonic() < deadline  # the first is not read yet
                assert answer.status_code == 503 and answer.headers["retry-after"]
                assert http.post(TEXT, json=GOOD).status_code == 200, "small ones are served"
                first.sendall(large[-1:])
                assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
                assert http.post(TEXT, json={**GOOD, "user": "x" * 900_000}).status_code == 200


def test_requests_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    with serve(tmp_path, None) as (url, _), connect(url) as client:
        last = request(TEXT, {**GOOD, "prompt": "three"}).replace(b"\r\nHost", b"\r\nConnection: close\r\nHost")
        client.sendall(request(TEXT, {**GOOD, "prompt": "one"}) + request(TEXT, {**GOOD, "prompt": "two"}) + last)
        texts = [body["choices"][0]["text"] for status, body in answers(read_all(client)) if status == 200]
        assert texts == ["one", "two", "thr"]


def test_a_loopback_server_is_reached_by_its_own_names_only(tmp_path: Path) -> None:
    """A page of another site cannot have its own name stand for this machine."""
    with serve(tmp_path, None, allowed_hosts=("gpu-1.example",)) as (url, _):
        port = url.rpartition(":")[2]
        for host in (
            f"127.0.0.1:{port}",
            "localhost",
            f"LOCALHOST:{port}",
            f"[::1]:{port}",
            "GPU-1.example",
            "10.0.0.7",
        ):
            assert httpx.get(url + "/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"):
            answer = httpx.get(url + "/v1/models", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host"), host


def test_with_a_key_nothing_but_health_and_documents_is_open(tmp_path: Path) -> None:
    with serve(tmp_path, None, api_key="s3cret") as (url, server):
        for path in ("/health", "/version", "/docs", "/docs/files/swagger-ui.css", "/openapi.json"):
            assert httpx.get(url + path).status_code == 200, path
        for given in (None, "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cret2"):
            headers = {} if given is None else {"Authorization": given}
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize"), ("GET", "/metrics")):
                answer = httpx.request(method, url + path, headers=headers, json=GOOD if method == "POST" else None)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert not [message for message in server.received if isinstance(message, m.Submit)]
        wrong = openai.OpenAI(base_url=url + "/v1", api_key="other", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(base_url=url + "/v1", api_key="s3cret", max_retries=0) as right:
            assert right.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].text == "abc"


def test_many_connections_that_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    with serve(tmp_path, None) as (url, _):
        idle: list[socket.socket] = [connect(url) for _ in range(300)]
        try:
            assert httpx.post(url + TEXT, json=GOOD).status_code == 200
        finally:
            for client in idle:
                client.close()
