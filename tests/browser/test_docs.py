"""The documentation of the API in a real browser, which reaches nothing but this server and has no key."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, expect

from tests.gateway.in_process import serve


def test_the_api_is_documented_without_the_internet(tmp_path: Path, context: BrowserContext) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    with serve(tmp_path, None, api_key="s3cret") as (url, _):
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(url + "/docs")
        operation = page.locator(".opblock", has_text="/v1/chat/completions")
        operation.locator("button").first.click()
        expect(operation).to_contain_text("max_completion_tokens")
        assert {urlsplit(at).netloc for at in asked if not at.startswith("data:")} == {urlsplit(url).netloc}
        assert not complaints
        page.close()
