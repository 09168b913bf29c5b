"""One line per event on stderr: time, process, level, text."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

_PREFIX = re.compile(r"\d\d:\d\d:\d\d\.\d{3} \S+ +[A-Z]+ +")


def message_of(line: str) -> str:
    """A line without the time, process and level that `set_up` puts before it; any other line as it is."""
    return line[match.end() :] if (match := _PREFIX.match(line)) else line


def set_up(process: str, level: str, stream: Any = None) -> logging.Logger:
    """Configure this process's root logger and return the one named after the process.

    stream: where lines are written, a text stream; None: stderr.
    """
    logging.basicConfig(
        stream=stream or sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {process:<10} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    return logging.getLogger(process)
