"""One line per event on stderr: time, process, level, text."""

from __future__ import annotations

import logging
import sys


def set_up(process: str, level: str) -> logging.Logger:
    """Configure this process's root logger and return the one named after the process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {process:<10} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    return logging.getLogger(process)
