"""Several threads for one piece of work, with nothing of Python between them. Knows no kernel.

Work is a compiled function work(arguments, scratch) of two int64 addresses, `cfunc` of `jit.work`: everybody who takes
part calls it, and it claims its items from a counter until none is left. The caller always takes part. Helpers spin
between pieces of work, which follow each other by microseconds within a step, and leave after a millisecond or two.

The control block, int64 words on cache lines of their own:
    GATE     CLOSED, plus the number of helpers inside. A helper adds one; if the gate was closed it takes that back.
             So a helper that comes late never touches arguments that change, and nobody waits for one that left.
    TURN     counts the pieces of work: a helper does not enter the same one twice
    FUNCTION, ARGUMENTS: what to call
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from kernels.cpu.jit import kernel
from kernels.cpu.vectors import call, fetch_add, pause, read_i64, write_i64, yield_processor

LINE = 64
GATE, TURN, FUNCTION, ARGUMENTS = (LINE * word for word in range(4))
CLOSED = 1 << 32
PATIENCE = 20_000  # turns of a spinning helper before it leaves: a millisecond or two
BEFORE_YIELD = 64


@kernel
def _lead(control, function, arguments, scratch):
    """Offer a piece of work, take part in it, and wait for those who joined."""
    write_i64(control + FUNCTION, function)
    write_i64(control + ARGUMENTS, arguments)
    fetch_add(control + TURN, 1)
    fetch_add(control + GATE, -CLOSED)
    call(function, arguments, scratch)
    fetch_add(control + GATE, CLOSED)
    spins = 0
    while fetch_add(control + GATE, 0) != CLOSED:
        spins += 1
        if spins % BEFORE_YIELD == 0:
            yield_processor()
        else:
            pause()


@kernel
def _assist(control, scratch):
    """Help with whatever is offered, until nothing was for a while."""
    turn = 0
    spins = 0
    while spins < PATIENCE:
        if fetch_add(control + TURN, 0) == turn or fetch_add(control + GATE, 0) >= CLOSED:
            spins += 1
            pause()
            continue
        if fetch_add(control + GATE, 1) < CLOSED:
            turn = fetch_add(control + TURN, 0)
            call(read_i64(control + FUNCTION), read_i64(control + ARGUMENTS), scratch)
            spins = 0
        fetch_add(control + GATE, -1)


@kernel
def _alone(function, arguments, scratch):
    call(function, arguments, scratch)


class Team:
    """`num_threads` threads, the caller's included; one caller at a time."""

    def __init__(self, num_threads: int, scratch_bytes: int) -> None:
        """scratch_bytes: memory each of them has for itself, 64-byte aligned."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self.num_threads = num_threads
        self._memory = [torch.zeros(scratch_bytes, dtype=torch.uint8) for _ in range(num_threads)]
        self._scratch = [memory.data_ptr() for memory in self._memory]
        self._buffers: dict[str, torch.Tensor] = {}
        self._helpers: list[Future[None]] = []
        if num_threads == 1:
            return
        self._words = torch.zeros(4 * LINE, dtype=torch.uint8)
        self._words.numpy().view(np.int64)[GATE // 8] = CLOSED
        self._control = self._words.data_ptr()
        self._pool = ThreadPoolExecutor(num_threads - 1, thread_name_prefix="team")
        self._helpers = [self._helper(index) for index in range(num_threads - 1)]

    def run(self, function: int, arguments: int) -> None:
        """Call work(arguments, scratch), by its address, on all threads that are there; returns when all are done."""
        if self.num_threads == 1:
            _alone(function, arguments, self._scratch[0])
            return
        for index, helper in enumerate(self._helpers):
            if helper.done():
                self._helpers[index] = self._helper(index)
        _lead(self._control, function, arguments, self._scratch[0])

    def _helper(self, index: int) -> Future[None]:
        """One more helper, there in some microseconds; it keeps the memory that it uses."""
        return self._pool.submit(_stay, self._words, self._memory[1 + index])

    def memory(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """`size` elements to work in until the same name is asked for again."""
        buffer = self._buffers.get(name)
        num_bytes = size * dtype.itemsize
        if buffer is None or buffer.shape[0] < num_bytes:
            buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype)


def _stay(words: torch.Tensor, scratch: torch.Tensor) -> None:
    _assist(words.data_ptr(), scratch.data_ptr())
