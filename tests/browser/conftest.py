"""The live page in a real browser. Without Chromium nothing here is collected, and the report says so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.integration.deployment import Deployment
from tests.tiny_model import write_tiny_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WORKERS = ("worker-0", "worker-1")

TIMEOUT_MS = 30_000
"""For whatever is waited for: a busy machine takes seconds to start a process."""
expect.set_options(timeout=TIMEOUT_MS)

collect_ignore_glob = [] if CHROMIUM else ["*"]


def pytest_report_collectionfinish() -> str:
    if CHROMIUM:
        return f"tests/browser: with {CHROMIUM}"
    return "tests/browser: not collected, there is no chromium here (Debian: apt-get install chromium)"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two workers of a tiny model, with a window group beside the full one, and a gateway."""
    kind = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096, **kind)
    flags = ["--model", str(model), "--workers", "2", "--dtype", "float32", "--kv-memory", "16MiB", "--port", "0"]
    with Deployment(tmp_path_factory.mktemp("browser"), *flags) as deployment:
        yield deployment


@pytest.fixture
def server(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment, whole and idle before the test and after it."""
    with deployment.whole_and_idle(WORKERS):
        yield deployment


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer than the module: while it is open, an event loop runs in this thread, and asyncio.run must fail."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, server: Deployment) -> Iterator[Page]:
    """The live page, open. The test fails when its scripts complain."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(server.endpoints["http"])
    page.wait_for_selector("body[data-line=live]")
    yield page
    assert not complaints
