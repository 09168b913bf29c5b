"""Several threads for one piece of work, with nothing of Python between them. Knows no kernel.

Work is a compiled function work(arguments, scratch) of two int64 addresses, `cfunc` of `jit.work`: everybody who takes
part calls it, and it claims its items from a counter until none is left. The caller always takes part. Helpers spin
between pieces of work, which follow each other by microseconds within a step, and park after a millisecond without any.

The control block, int64 words on cache lines of their own:
    GATE     CLOSED, plus the number of helpers inside. A helper adds one; if the gate was closed it takes that back.
             So a helper that comes late never touches arguments that change, and nobody waits for a parked one.
    TURN     counts the pieces of work: a helper does not enter the same one twice
    FUNCTION, ARGUMENTS: what to call
    PARKED   and following: 1 while that helper waits in Python for its event
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch

from kernels.cpu.jit import kernel
from kernels.cpu.vectors import call, fetch_add, pause, read_i64, write_i64, yield_processor

LINE = 64
GATE, TURN, FUNCTION, ARGUMENTS, PARKED = (LINE * word for word in range(5))
CLOSED = 1 << 32
PATIENCE = 20_000  # turns of a spinning helper before it parks: a millisecond or two
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
def _assist(control, parked, scratch):
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
    fetch_add(parked, 1)


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
        scratch = [torch.zeros(scratch_bytes, dtype=torch.uint8) for _ in range(num_threads)]
        self._own, *self._helpers_scratch = scratch
        self._scratch = scratch[0].data_ptr()
        self._buffers: dict[str, torch.Tensor] = {}
        if num_threads == 1:
            return
        self._memory = torch.zeros(PARKED + LINE * num_threads, dtype=torch.uint8)
        self._control = self._memory.data_ptr()
        words = self._memory.numpy().view(np.int64)
        words[GATE // 8] = CLOSED
        self._parked = words[PARKED // 8 :: LINE // 8]
        self._wake = [threading.Event() for _ in range(num_threads - 1)]
        stopping = threading.Event()
        for index, wake in enumerate(self._wake):
            arguments = (self._memory, PARKED + LINE * index, scratch[1 + index], wake, stopping)
            threading.Thread(target=_help, args=arguments, name=f"team-{index + 1}", daemon=True).start()
        weakref.finalize(self, _stop, stopping, self._wake)

    def run(self, function: int, arguments: int) -> None:
        """Call work(arguments, scratch), by its address, on all threads that are there; returns when all are done."""
        if self.num_threads == 1:
            _alone(function, arguments, self._scratch)
            return
        if self._parked.any():
            for wake in self._wake:
                wake.set()
        _lead(self._control, function, arguments, self._scratch)

    def memory(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """`size` elements to work in until the same name is asked for again."""
        buffer = self._buffers.get(name)
        num_bytes = size * dtype.itemsize
        if buffer is None or buffer.shape[0] < num_bytes:
            buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype)


def _help(
    memory: torch.Tensor, parked: int, scratch: torch.Tensor, wake: threading.Event, stopping: threading.Event
) -> None:
    """The life of a helper. `parked`: its word's place in the control block, `memory`."""
    word = memory.numpy().view(np.int64)[parked // 8 : parked // 8 + 1]
    while not stopping.is_set():
        _assist(memory.data_ptr(), memory.data_ptr() + parked, scratch.data_ptr())
        wake.wait()
        wake.clear()
        word[0] = 0


def _stop(stopping: threading.Event, wake: list[threading.Event]) -> None:
    stopping.set()
    for event in wake:
        event.set()
