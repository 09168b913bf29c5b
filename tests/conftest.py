"""What all tests share: signals as in a terminal's foreground, however pytest was started."""

from __future__ import annotations

import signal

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would our children
