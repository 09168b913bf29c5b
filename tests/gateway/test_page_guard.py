"""Who gets the page's button and who may press it; the page's own files and their headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request

from gateway.errors import ApiError
from gateway.page import files
from gateway.page.guard import TOKEN_HEADER, Guard
from protocol import messages as m
from protocol.config import EngineConfig
from tests.client.scripted_server import STATUS, ScriptedServer
from tests.gateway.in_process import ask

HERE = "127.0.0.1:8000"
STATIC = Path(files.__file__).parent / "static"


def request(client: tuple[str, int] | None = ("127.0.0.1", 5), **headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": pairs, "client": client})


def good(guard: Guard, **changes: str) -> dict[str, str]:
    """Headers that the page sends."""
    token = guard.token_for(request(host=HERE))
    headers = {"host": HERE, "origin": f"http://{HERE}", "sec_fetch_site": "same-origin"}
    return {**headers, TOKEN_HEADER.lower().replace("-", "_"): token, **changes}


@pytest.mark.parametrize("host", [HERE, "localhost:8000", "[::1]:8000", "127.3.4.5:1", "page.localhost:80"])
def test_the_page_itself_may(host: str) -> None:
    guard = Guard(EngineConfig())
    guard.check_kill(request(**good(guard, host=host, origin=f"http://{host}")))
    guard.check_kill(request(("::ffff:127.0.0.1", 5), **good(guard)))


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("a name that was made to lead here", {"host": "evil.example:8000", "origin": "http://evil.example:8000"}),
        ("no host", {"host": ""}),
        ("a host that is none", {"host": "[::1", "origin": "http://[::1"}),
        (
            "localhost as a part of another name",
            {"host": "localhost.evil.example", "origin": "http://localhost.evil.example"},
        ),
        ("another site's page", {"origin": "https://evil.example"}),
        ("another port's page", {"origin": "http://127.0.0.1:9000"}),
        ("a page without origin", {"origin": "null"}),
        ("no origin", {"origin": ""}),
        ("the browser says another site", {"sec_fetch_site": "cross-site"}),
        ("the browser says another port", {"sec_fetch_site": "same-site"}),
        ("no token", {"x_pageplane_token": ""}),
        ("a guessed token", {"x_pageplane_token": "A" * 43}),
        ("a proxy", {"x_forwarded_for": "127.0.0.1"}),
        ("another proxy", {"forwarded": "for=127.0.0.1"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nobody_else_may(reason: str, changes: dict[str, str]) -> None:
    guard = Guard(EngineConfig())
    with pytest.raises(ApiError) as refused:
        guard.check_kill(request(**good(guard, **changes)))
    assert refused.value.status == 403, reason


def test_no_other_machine_may_and_none_when_it_is_switched_off() -> None:
    guard = Guard(EngineConfig(host="0.0.0.0"))
    for client in (("192.168.1.7", 5), None):
        with pytest.raises(ApiError):
            guard.check_kill(request(client, **good(guard)))
        assert guard.token_for(request(client, host=HERE)) == ""
    off = Guard(EngineConfig(kill_button=False))
    assert off.token_for(request(host=HERE)) == "" and "--no-kill-button" in (off.refusal(request(host=HERE)) or "")
    with pytest.raises(ApiError):
        off.check_kill(request(**good(off, x_pageplane_token="")))


def kill(runtime: Path, **settings: Any) -> Any:
    """Ask over HTTP to kill the scripted worker, with what `settings` change in the question."""
    body = settings.pop("body", {"worker_id": "worker-0", "incarnation": "first"})
    status = msgspec.structs.replace(STATUS, workers=(msgspec.structs.replace(STATUS.workers[0], incarnation="first"),))

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.GetStatus):
            server.send(identity, status)
            return True
        return False

    async def questions(client: httpx.AsyncClient, server: ScriptedServer) -> httpx.Response:
        guard = client._transport.app.state.gateway.guard  # type: ignore[attr-defined]
        headers = {name.replace("_", "-"): value for name, value in good(guard, **settings).items()}
        return await client.post("/v1/page/kill", json=body, headers=headers)

    return ask(runtime, handler, questions)


def test_a_process_that_is_gone_is_not_confused_with_its_successor(tmp_path: Path) -> None:
    stale = kill(tmp_path, body={"worker_id": "worker-0", "incarnation": "an earlier one"})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "gone")


def test_an_unknown_worker_a_bad_body_and_a_missing_token(tmp_path: Path) -> None:
    assert kill(tmp_path, body={"worker_id": "worker-9", "incarnation": "first"}).status_code == 404
    assert kill(tmp_path, body={"pid": 1}).status_code == 400
    assert kill(tmp_path, x_pageplane_token="wrong").status_code == 403


def test_the_key_guards_the_data_and_not_the_page_itself(tmp_path: Path) -> None:
    async def questions(client: httpx.AsyncClient, server: ScriptedServer) -> list[int]:
        paths = ("/", "/page/main.js", "/v1/page/events", "/v1/page/block?replica=0&block_id=1", "/v1/page/table")
        return [(await client.get(path)).status_code for path in paths]

    assert ask(tmp_path, None, questions, api_key="secret") == [200, 200, 401, 401, 401]


def test_every_file_is_served_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    names = {path.name for path in STATIC.iterdir()}
    assert set(files.load()) == names
    for path in STATIC.iterdir():
        text = path.read_text()
        used = re.findall(r'(?:from |import\(|src=|href=)"(?:\./|/page/)([\w.]+)"', text)
        assert set(used) <= names, path.name
        links = set(re.findall(r"https?://[\w./]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not links, path.name
        assert " style=" not in text and "onclick=" not in text.lower().replace(" onclick=", ""), path.name

    async def questions(client: httpx.AsyncClient, server: ScriptedServer) -> None:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        again = await client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/page/..%2fguard.py")).status_code == 404
        assert (await client.get("/page/nothing.js")).status_code == 404

    ask(tmp_path, None, questions)
