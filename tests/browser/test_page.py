"""What people do with the live page: watch a request, look at blocks, kill a worker, ask; by mouse and by keys."""

from __future__ import annotations

import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.integration.deployment import Deployment

LONG = 3000
"""Tokens of a request that is still running when a person has looked and clicked."""
BODY = {"prompt": list(range(40)), "ignore_eos": True, "temperature": 0}


@contextmanager
def running(server: Deployment, name: str) -> Iterator[None]:
    """A request that runs until the block is left (or its 4,000 tokens are made)."""
    body = {**BODY, "max_tokens": 4000, "stream": True}
    url = server.endpoints["http"] + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers={"X-Request-Id": name}, timeout=60) as answer:
        assert answer.status_code == 200
        yield


@contextmanager
def to_the_end(server: Deployment, name: str) -> Iterator[None]:
    """A request of LONG tokens, all of which must have come in the end."""
    body = {**BODY, "max_tokens": LONG}
    with ThreadPoolExecutor(1) as pool:
        url = server.endpoints["http"] + "/v1/completions"
        answer = pool.submit(lambda: httpx.post(url, json=body, headers={"X-Request-Id": name}, timeout=120).json())
        yield
        assert answer.result()["usage"]["completion_tokens"] == LONG


def test_a_running_request_shows_its_progress_and_its_block_table(page: Page, server: Deployment) -> None:
    expect(page.locator("#requests-empty")).to_be_visible()
    with running(server, "watched"):
        row = page.locator("#requests-list li", has_text="watched")
        expect(row).to_contain_text("40 prompt")
        expect(page.locator("#total-running")).to_have_text("1")
        row.click()
        expect(row).to_have_attribute("aria-selected", "true")
        tables = page.locator("#inspect .table")
        expect(tables).to_have_count(2)  # two cache groups
        expect(tables.nth(0).locator("li").first).to_contain_text(re.compile(r"^0\d+$"))
        expect(tables.nth(1)).to_contain_text("null")  # what has left the window
        replica = row.locator(".where").inner_text().removeprefix("replica ")
        shown = page.evaluate(
            """replica => {
                const canvas = document.querySelector(`[data-replica="${replica}"] canvas.over`);
                const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                return pixels.some((value) => value > 0);
            }""",
            replica,
        )
        assert shown, "the path through the map is not drawn"
        assert page.locator(f'[data-replica="{replica}"] .strip .note').inner_text().startswith("last ")
    expect(page.locator("#requests-empty")).to_be_visible()
    expect(page.locator("#inspect")).to_contain_text("has ended")


def test_a_worker_killed_by_the_button_comes_back_and_its_request_finishes(page: Page, server: Deployment) -> None:
    with to_the_end(server, "watched"):
        row = page.locator("#requests-list li", has_text="watched")
        expect(row.locator(".where")).to_have_text(re.compile(r"replica \d"))
        replica = row.locator(".where").inner_text().removeprefix("replica ")
        card = page.locator(f'[data-replica="{replica}"]')
        pid = server.pids[f"worker-{replica}"]
        card.locator("button.kill").click()
        expect(card.locator("button.kill")).to_have_text(f"kill -9 {pid} now")
        assert server.pids[f"worker-{replica}"] == pid, "one press alone must not kill"
        card.locator("button.kill").click()
        expect(page.locator("body")).to_have_attribute("data-line", "degraded")
        expect(page.locator("#banner")).to_contain_text("1 of 2 replicas")
        expect(card.locator(".gone")).to_be_visible()
        expect(page.locator("#happened-list")).to_contain_text("1 unfinished request goes on")
        expect(row.locator(".where")).to_have_text(f"replica {1 - int(replica)}")
    server.wait_in_service([f"worker-{replica}"], not_pids=[pid])
    expect(page.locator("body")).to_have_attribute("data-line", "live")
    expect(card.locator(".epoch")).to_have_text(re.compile("epoch [1-9]"))
    expect(card.locator("canvas.cells")).to_be_visible()
    assert f"worker-{replica} (pid {pid}) ended: killed by SIGKILL: kill -9 from the live page" in server.text


def test_the_prompt_box_streams_an_answer_and_selects_its_request(page: Page) -> None:
    page.fill("#prompt", "Where does my memory go?")
    page.select_option("#most", "1024")
    page.press("#prompt", "Enter")
    expect(page.locator("#requests-list li.own[aria-selected=true], #inspect:visible").first).to_be_visible()
    expect(page.locator("#inspect-body .mono").first).to_contain_text(re.compile(r"^page-[0-9a-f]+-"))
    expect(page.locator("#answer-note")).to_contain_text(re.compile(r"prompt tokens, .* generated in"), timeout=60_000)


def test_a_block_tells_about_itself_under_the_pointer_and_by_keyboard(page: Page, server: Deployment) -> None:
    cells = page.locator('[data-replica="0"] canvas.cells')
    cells.hover(position={"x": 4, "y": 4})
    expect(page.locator("#tip")).to_contain_text("Block 0: null block")
    expect(page.locator("#tip")).to_contain_text("never allocated")
    cells.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#spoken")).to_contain_text("Block 1: ")
    page.keyboard.press("Enter")
    expect(page.locator("#inspect-title")).to_have_text("Block 1 of replica 0")
    expect(page.locator("#inspect")).to_contain_text("unchanged for")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_requests_are_chosen_by_keyboard(page: Page, server: Deployment) -> None:
    with running(server, "first"), running(server, "second"):
        expect(page.locator("#requests-list li")).to_have_count(2)
        page.focus("#requests-list")
        page.keyboard.press("End")
        expect(page.locator("#requests-list li").nth(1)).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Escape")
        expect(page.locator("#inspect")).to_be_hidden()


def test_a_page_of_another_origin_cannot_press_the_button(
    context: BrowserContext, page: Page, server: Deployment
) -> None:
    """A site open in the same browser: whatever way it asks, the worker lives."""
    worker = next(w for w in server.status().workers if w.worker_id == "worker-0")
    body = {"worker_id": worker.worker_id, "incarnation": worker.incarnation}
    with _other_site() as elsewhere:
        other = context.new_page()
        other.goto(elsewhere)
        outcomes = other.evaluate(
            """async ([url, body]) => {
                const ways = [
                    {headers: {"Content-Type": "application/json", "X-Pageplane-Token": "guessed"}},
                    {headers: {"Content-Type": "application/json"}},
                    {headers: {"Content-Type": "text/plain"}},
                    {mode: "no-cors"},
                    {mode: "no-cors", credentials: "include", headers: {"Content-Type": "text/plain"}},
                ];
                const outcomes = [];
                for (const way of ways) {
                    const options = {method: "POST", body: JSON.stringify(body), ...way};
                    outcomes.push(await fetch(url, options).then((a) => `${a.type} ${a.status}`, () => "refused"));
                }
                outcomes.push(await fetch(url.replace("kill", "events")).then(() => "read", () => "refused"));
                return outcomes;
            }""",
            [server.endpoints["http"] + "/v1/page/kill", body],
        )
        assert outcomes == ["refused", "refused", "refused", "opaque 0", "opaque 0", "refused"]
        framed = other.evaluate(
            """url => new Promise((done) => {
                const frame = document.createElement("iframe");
                frame.src = url;
                frame.onload = () => done(frame.contentDocument === null ? "sealed" : "open");
                document.body.append(frame);
            })""",
            server.endpoints["http"],
        )
        frame = next(frame for frame in other.frames if frame != other.main_frame)
        assert framed == "sealed" and "Pageplane" not in frame.content()
        other.close()
    assert worker.pid in {w.pid for w in server.status().workers if w.state == "ready"}


@contextmanager
def _other_site() -> Iterator[str]:
    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title><link rel=icon href='data:,'>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://localhost:{other.server_port}"
        other.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_are_told_apart_without_colour(context: BrowserContext, server: Deployment, scheme: str) -> None:
    """Cells of any two states differ in lightness (grey value), with and without room for their shapes."""
    page = context.new_page()
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(server.endpoints["http"])
    greys = page.evaluate(
        """async () => {
            const { makeTiles } = await import("/page/tiles.js");
            const grey = (dot) => 0.2126 * (dot & 255) + 0.7152 * ((dot >> 8) & 255) + 0.0722 * ((dot >> 16) & 255);
            const mean = (tile) => tile.reduce((sum, dot) => sum + grey(dot), 0) / tile.length;
            return [4, 16].map((size) => makeTiles(["free", "cached", "used", "shared"], size, 0).map(mean));
        }"""
    )
    for by_state in greys:
        ordered = sorted(by_state)
        assert min(b - a for a, b in itertools.pairwise(ordered)) > 20, greys


def test_it_fits_a_phone(context: BrowserContext, server: Deployment) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.endpoints["http"])
    page.wait_for_selector("canvas.cells")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        "[...document.querySelectorAll('button, select')].filter((b) => b.offsetHeight && b.offsetHeight < 40).length"
    )
    assert small == 0, "too small for a finger"


def test_a_gateway_that_dies_is_noticed_and_found_again(context: BrowserContext, server: Deployment) -> None:
    page = context.new_page()  # the browser itself complains about the line that broke
    page.goto(server.endpoints["http"])
    expect(page.locator("body")).to_have_attribute("data-line", "live")
    server.kill("gateway")
    expect(page.locator("body")).to_have_attribute("data-line", "gone")
    expect(page.locator("#banner")).to_contain_text("The gateway does not answer")
    expect(page.locator("body")).to_have_attribute("data-line", "live")
    expect(page.locator("#banner")).to_be_hidden()
