"""What all tests share: signals as in a terminal's foreground, and two processes for the whole suite."""

from __future__ import annotations

import os
import signal

import pytest

# a shell's background job ignores it, and so would our children
signal.signal(signal.SIGINT, signal.default_int_handler)

PROCESSES = 2
"""Much of the suite waits for processes that start or die; more would only starve those, on a machine of two cores."""

LONGEST = ("integration", "chaos", "sim", "gateway", "browser")
"""Folders of tests whose files take longest."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone, the whole suite, runs in two processes, file by file. Anything named, or -n, runs as asked."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ or not everything or not config.pluginmanager.has_plugin("xdist"):
        return
    if option.numprocesses is None and not option.usepdb and not option.collectonly:
        option.numprocesses = PROCESSES
        option.dist = "loadfile"
        option.loadscopereorder = (
            False  # xdist would leave the files with the fewest tests, which are the longest, for last
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that both processes end at about the same time."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=place)
