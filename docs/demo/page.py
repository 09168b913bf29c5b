"""The pictures of docs/page.md: a server under some load, its live page photographed in Chromium.

    python launch.py --workers 2 --kv-memory 120MiB
    PYTHONPATH=. python docs/demo/page.py http://127.0.0.1:8000 FOLDER

Needs the test extra and chromium. The last picture kills a worker.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

HOUSE = (
    "You are a helpful assistant of a small museum of computing. You answer questions of visitors in a friendly way, "
    "with short sentences, and you never forget to name the year, the people and the machine. "
) * 5
TOPICS = ("the first page table", "virtual memory on the Atlas", "the Manchester Baby", "magnetic core memory")
STORY = (
    "Write a long story, in many chapters, about a page that was lost and found again. "
    "Begin with chapter one and do not stop before chapter ten."
)


def visitors(url: str, count: int, tokens: int) -> list[threading.Thread]:
    """So many questions at once, all under one system message."""

    def ask(number: int) -> None:
        question = f"Tell me about {TOPICS[number % 4]}, please, at length. " + "And its history. " * (3 * number)
        body = {
            "messages": [{"role": "system", "content": HOUSE}, {"role": "user", "content": question}],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        name = {"X-Request-Id": f"visitor-{number + 1}"}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=name, timeout=900).raise_for_status()

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def open_page(browser: Browser, url: str, **options: object) -> Page:
    page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
    page.goto(url)
    page.wait_for_selector("canvas.cells")
    return page


def main(url: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--headless", "--no-sandbox"])
        page = open_page(browser, url, viewport={"width": 1440, "height": 960}, color_scheme="light")
        for thread in visitors(url, 6, 60):
            thread.join()
        visitors(url, 12, 700)
        page.fill("#prompt", STORY)
        page.select_option("#most", "1024")
        page.click("#send")
        page.locator(".table li").nth(9).wait_for(timeout=300_000)  # it has got its tenth block
        own = page.locator("#requests-list .own .where").inner_text().removeprefix("replica ")
        other = page.locator(f".replica:not([data-replica='{own}']) canvas.cells").first
        other.hover(position={"x": 66, "y": 12})
        page.locator("#tip", has_text="table entries").wait_for()
        page.screenshot(path=folder / "page-light.png")
        page.mouse.move(5, 5)
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / "page-dark.png")
        phone = open_page(
            browser, url, viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True, has_touch=True
        )
        phone.locator("#requests-list li", has_text="replica 0").last.click()
        phone.locator(".table li").first.wait_for()
        phone.evaluate("document.querySelector('.maphead').scrollIntoView()")
        phone.screenshot(path=folder / "page-phone.png")
        page.emulate_media(color_scheme="light")
        button = page.locator(f"[data-replica='{own}'] button.kill")
        button.click()
        button.click()
        page.locator(f"#requests-list .own .where:not(:has-text('replica {own}')):has-text('replica')").wait_for()
        page.locator(".table li").first.wait_for()
        page.screenshot(path=folder / "page-degraded.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
