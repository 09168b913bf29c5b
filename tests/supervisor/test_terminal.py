"""Logs and progress bars share the terminal without spoiling each other."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from supervisor.terminal import Terminal, fraction_of

CLEAR_LINE = "\x1b[1A\x1b[2K"


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


def on_screen(screen: io.StringIO, *, terminal: bool = True) -> Terminal:
    return Terminal(Console(file=screen, force_terminal=terminal, width=80))


@pytest.mark.parametrize(
    ("line", "fraction"),
    [("@progress 0.42\n", 0.42), ("@progress 1.00\n", 1.0), ("@progress\n", None), ("at @progress 0.4\n", None)],
)
def test_only_progress_lines_report_progress(line: str, fraction: float | None) -> None:
    assert fraction_of(line) == fraction


def test_bars_are_drawn_and_removed_when_full(screen: io.StringIO) -> None:
    terminal = on_screen(screen)
    terminal.progress("worker-0", 0.5)
    terminal.progress("worker-1", 0.1)
    assert "worker-0 loads weights" in screen.getvalue()
    terminal.progress("worker-0", 1.0)
    terminal.progress("worker-1", 1.0)
    assert screen.getvalue().endswith(CLEAR_LINE)


def test_log_line_stands_above_the_bars(screen: io.StringIO) -> None:
    terminal = on_screen(screen)
    terminal.progress("worker-0", 0.5)
    before = len(screen.getvalue())
    terminal.write("12:00:00 worker-1 [bold]ready[/]\n")
    written = screen.getvalue()[before:]
    assert written.index("12:00:00 worker-1 [bold]ready[/]\n") < written.index("worker-0 loads weights")


def test_log_line_stands_alone_once_the_bars_are_closed(screen: io.StringIO) -> None:
    terminal = on_screen(screen)
    terminal.progress("worker-0", 0.5)
    terminal.close_bars()
    before = len(screen.getvalue())
    terminal.progress("worker-0", 0.6)
    terminal.write("line\n")
    assert screen.getvalue()[before:] == "line\n"


def test_without_a_terminal_there_are_no_bars(screen: io.StringIO) -> None:
    terminal = on_screen(screen, terminal=False)
    terminal.progress("worker-0", 0.5)
    terminal.write("line\n")
    assert screen.getvalue() == "line\n"
