"""Waits for a device's marks on a thread of its own and says so through a file descriptor that a poller can watch.

So one loop can wait for the next message and for the end of a step, whichever comes first, without polling either.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress

from worker.device import Mark

STOP_TIMEOUT_S = 5.0


class CompletionThread:
    """`fd` is readable when a mark that was watched has been passed (or has failed: whoever takes the result is told)
    since `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._marks: queue.SimpleQueue[Mark | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._thread.start()

    def watch(self, mark: Mark) -> None:
        self._marks.put(mark)

    def clear(self) -> None:
        """Not readable any more until the next mark is passed."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def stop(self) -> None:
        """End the thread and close the descriptor, unless the device hangs: then both end with the process."""
        self._marks.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.fd)

    def _run(self) -> None:
        while (mark := self._marks.get()) is not None:
            with suppress(RuntimeError):  # a broken device
                mark.synchronize()
            os.eventfd_write(self.fd, 1)
