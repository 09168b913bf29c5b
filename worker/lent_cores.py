"""Which cores of this machine have nothing to do, told among the workers of a deployment. Knows no kernel.

A file of one line per core, which all workers map: core n belongs to thread n % threads of replica n // threads.
Cores are not pinned: what is lent is the right to keep as many threads busy as somebody else keeps idle. A worker says
OWNER 1 for its cores except while it waits (`idle`); the helpers of other workers read it, and mark as BORROWER what
they take (`kernels.cpu.team`). It is a hint about time and carries no data, so nothing can go wrong that shows in a
token: a worker that was killed or stopped in the middle of a step is taken for busy, and its core is lent again when
its successor waits for the first time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FILE = "lent_cores"
LINE = 64  # bytes: a cache line
OWNER, BORROWER = 0, 1  # int64 words of a line, as `kernels.cpu.team` knows them


class LentCores:
    """One worker's view. Whoever comes first makes the file; nobody removes it but the supervisor, with its folder."""

    def __init__(self, folder: Path, replica: int, num_replicas: int, threads: int) -> None:
        """folder: the runtime folder. threads: of each replica. From now on this worker counts as busy."""
        size = num_replicas * threads * LINE
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)  # zeros at first; the same size every time
            self._lines = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.int64).reshape(-1, LINE // 8)
        finally:
            os.close(descriptor)
        first, last = replica * threads, (replica + 1) * threads
        self.borrower = replica + 1
        """Our number in the BORROWER of others' cores."""
        self._ours = self._lines[first:last, OWNER]
        self._ours[:] = 1
        self._lines[self._lines[:, BORROWER] == self.borrower, BORROWER] = 0  # taken by our predecessor, which is dead
        others = [*range(last, len(self._lines)), *range(first)]  # our neighbour's first: so borrowers spread
        self.others = [self._lines[core].ctypes.data for core in others]
        """Addresses of the lines of cores that may be borrowed; valid while this object lives."""

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Others may use our cores meanwhile."""
        self._ours[:] = 0
        try:
            yield
        finally:
            self._ours[:] = 1

    def leave(self) -> None:
        """Nothing will be computed here any more."""
        self._ours[:] = 0
