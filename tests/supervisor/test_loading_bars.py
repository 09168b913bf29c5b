"""Workers' progress lines become bars on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from supervisor.loading_bars import LoadingBars, fraction_of


@pytest.mark.parametrize(
    ("line", "fraction"),
    [("@progress 0.42\n", 0.42), ("@progress 1.00\n", 1.0), ("@progress\n", None), ("at @progress 0.4\n", None)],
)
def test_only_progress_lines_report_progress(line: str, fraction: float | None) -> None:
    assert fraction_of(line) == fraction


def test_bars_are_drawn_on_a_terminal_and_removed_when_full() -> None:
    screen = io.StringIO()
    bars = LoadingBars(Console(file=screen, force_terminal=True, width=80))
    handlers = [(handler, getattr(handler, "stream", None)) for handler in logging.getLogger().handlers]
    bars.update("worker-0", 0.5)
    bars.update("worker-1", 0.1)
    assert "worker-0 loads weights" in screen.getvalue()
    bars.update("worker-0", 1.0)
    bars.update("worker-1", 1.0)
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # the last line is cleared again
    assert handlers == [(handler, getattr(handler, "stream", None)) for handler in logging.getLogger().handlers]


def test_nothing_is_drawn_after_close_or_without_a_terminal() -> None:
    for terminal in (True, False):
        screen = io.StringIO()
        bars = LoadingBars(Console(file=screen, force_terminal=terminal))
        if terminal:
            bars.close()
        bars.update("worker-0", 0.5)
        assert screen.getvalue() == ""
