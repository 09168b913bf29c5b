"""SIGINT, SIGTERM and SIGHUP as a readable file descriptor, so that one poll sees them among everything else."""

from __future__ import annotations

import os
import signal

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """From its creation on these signals no longer interrupt; they make `fd` readable. Main thread only."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _STOP:
            signal.signal(number, _ignore)

    def take(self) -> signal.Signals | None:
        """The last stop signal that came since the previous call, if one did."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return None
        stops = [signal.Signals(number) for number in numbers if number in _STOP]
        return stops[-1] if stops else None


def _ignore(number: int, frame: object) -> None:
    """The wakeup descriptor does the work; a Python handler must exist for it to be written."""
