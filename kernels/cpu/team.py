"""Several threads for one piece of work, with nothing of Python between them. Knows no kernel.

Work is a compiled function work(arguments, scratch, owner) of three int64, `cfunc` of `jit.work`: everybody who takes
part calls it, and it claims its items one by one (`claim`) until none is left; it returns how many it did. The caller
always takes part, its helpers if they are there in time. Who computes an item must make no difference to it.

Helpers spin between pieces of work, which follow each other by microseconds within a step. When nothing came for a
millisecond or two, they sleep on a semaphore until the next piece wakes them: neither needs the GIL.

A helper may run on a **lent core**, one that somebody else owns. A line of memory, shared with the owner, says whether
it may: OWNER is 0 while the owner has nothing to compute, and BORROWER is 0, or the number of the one team that has
taken the core. The helper looks between items, and between pieces of work: once the owner is back it claims no further
item and sleeps. It is woken only while the core is free. All of this is a hint about time: whatever the line says, each
item is done once.

The control block, int64 words on cache lines of their own:
    GATE     CLOSED, plus the number of helpers inside. A helper adds one; if the gate was closed it takes that back.
             So a helper that comes late never touches arguments that change, and nobody waits for one that left.
    TURN     counts the pieces of work: a helper does not enter the same one twice
    OFFER    what to call: function, arguments; and about how many will take part (PRESENT)
    STOP     1: the helpers end
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.concurrency import (
    call,
    fetch_add,
    make_semaphore,
    pause,
    post,
    read_shared,
    replace_zero,
    wait_for_post,
    write_shared,
    yield_processor,
)
from kernels.cpu.jit import kernel, part
from kernels.cpu.vectors import read_i64, write_i64

LINE = 64
GATE, TURN, OFFER, STOP, CONTROL_BYTES = (LINE * line for line in range(5))
FUNCTION, ARGUMENTS, PRESENT = OFFER, OFFER + 8, OFFER + 16
OWNER, BORROWER = 0, 8  # of a lent core's line
SEMAPHORE, ASLEEP, CORE, SCRATCH, ITEMS = 0, 32, 40, 48, 56  # of a helper's line: CORE is a lent core's line, or 0
CLOSED = 1 << 32
NO_ITEM = 1 << 62
PATIENCE = 20_000  # turns of a spinning helper before it sleeps: a millisecond or two
BEFORE_YIELD = 64


@part
def claim(counter, owner):
    """The number of the next item, from the int64 counter; NO_ITEM if the owner of this thread's core wants it."""
    if owner != 0 and read_shared(owner) != 0:
        return NO_ITEM
    return fetch_add(counter, 1)


@part
def _may_work(core):
    return core == 0 or (read_shared(core + OWNER) == 0 and read_shared(core + BORROWER) == 0)


@kernel
def _lead(control, helpers, num_helpers, function, arguments, scratch):
    """Offer a piece of work, take part in it, and wait for those who joined. Returns how many items the caller did."""
    sleeping = 0
    for n in range(num_helpers):
        sleeping += read_shared(helpers + n * LINE + ASLEEP)
    write_i64(control + FUNCTION, function)
    write_i64(control + ARGUMENTS, arguments)
    write_i64(control + PRESENT, 1 + num_helpers - sleeping)
    fetch_add(control + TURN, 1)
    fetch_add(control + GATE, -CLOSED)
    for n in range(num_helpers if sleeping else 0):
        helper = helpers + n * LINE
        if read_shared(helper + ASLEEP) != 0 and _may_work(read_i64(helper + CORE)):
            write_shared(helper + ASLEEP, 0)
            post(helper + SEMAPHORE)
    items = call(function, arguments, scratch, 0)
    fetch_add(control + GATE, CLOSED)
    spins = 0
    while read_shared(control + GATE) != CLOSED:
        spins += 1
        if spins % BEFORE_YIELD == 0:
            yield_processor()
        else:
            pause()
    return items


@part
def _join_in(control, helper, core):
    """Help with whatever is offered, until nothing was for a while or the core is wanted by its owner."""
    turn = 0
    spins = 0
    while spins < PATIENCE and (core == 0 or read_shared(core + OWNER) == 0):
        if read_shared(control + TURN) == turn or read_shared(control + GATE) >= CLOSED:
            spins += 1
            if spins % BEFORE_YIELD == 0:
                yield_processor()
            else:
                pause()
            continue
        if fetch_add(control + GATE, 1) < CLOSED:
            turn = read_shared(control + TURN)
            function, arguments = read_i64(control + FUNCTION), read_i64(control + ARGUMENTS)
            items = call(function, arguments, read_i64(helper + SCRATCH), core)
            write_shared(helper + ITEMS, read_i64(helper + ITEMS) + items)
            spins = 0
        fetch_add(control + GATE, -1)


@kernel
def _assist(control, helper, borrower):
    """A helper's life: asleep, or at work, until it is told to stop."""
    while read_shared(control + STOP) == 0:
        core = read_i64(helper + CORE)
        if core == 0:
            _join_in(control, helper, core)
        elif replace_zero(core + BORROWER, borrower):
            _join_in(control, helper, core)
            write_shared(core + BORROWER, 0)
        write_shared(helper + ASLEEP, 1)
        wait_for_post(helper + SEMAPHORE)
        write_shared(helper + ASLEEP, 0)


@kernel
def _make_semaphores(helpers, num_helpers):
    for n in range(num_helpers):
        make_semaphore(helpers + n * LINE + SEMAPHORE)


@kernel
def _stop(control, helpers, num_helpers):
    write_shared(control + STOP, 1)
    for n in range(num_helpers):
        post(helpers + n * LINE + SEMAPHORE)


@dataclass
class _Helpers:
    """What helpers use, which outlives their team until they have ended."""

    control: torch.Tensor
    lines: torch.Tensor
    threads: list[threading.Thread]

    def end(self) -> None:
        """Returns when none runs any more."""
        if self.threads:
            _stop(self.control.data_ptr(), self.lines.data_ptr(), len(self.threads))
        while self.threads:
            self.threads.pop().join()


class Team:
    """`num_threads` threads, the caller's included, and one for each core that is lent. One caller at a time."""

    def __init__(self, num_threads: int, lent: Sequence[int] = (), borrower: int = 1) -> None:
        """lent: addresses of the lines of other owners' cores, which must stay what they are until `close`; borrower:
        this team's number among all that use these lines, not 0."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self.num_threads = num_threads
        self._cores = [0] * (num_threads - 1) + list(lent)
        self._control = _aligned(CONTROL_BYTES)
        self._lines = _aligned(LINE * max(1, len(self._cores)))
        self._words = self._lines.numpy().view(np.int64).reshape(-1, LINE // 8)
        self._scratch: list[torch.Tensor] = []
        self._caller_scratch = 0
        self._caller_items = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._control.numpy().view(np.int64)[GATE // 8] = CLOSED
        self.present = self._control.data_ptr() + PRESENT
        """Address of an int64: about how many take part in the present piece of work."""
        self.reserve(LINE)
        self._helpers = _Helpers(self._control, self._lines, [])
        self._end = weakref.finalize(self, self._helpers.end)  # also when the interpreter ends
        _make_semaphores(self._lines.data_ptr(), len(self._cores))
        for index, core in enumerate(self._cores):
            self._words[index, CORE // 8] = core
            arguments = (self._helpers.control, self._helpers.lines, index, borrower)
            thread = threading.Thread(target=_help, args=arguments, name=f"team-{index}", daemon=True)
            self._helpers.threads.append(thread)
            thread.start()

    def run(self, function: int, arguments: int) -> None:
        """Call work(arguments, scratch, owner), by its address, on all threads that are there; returns when all are
        done."""
        helpers = self._helpers
        self._caller_items += _lead(
            self._control.data_ptr(), self._lines.data_ptr(), len(helpers.threads), function, arguments,
            self._caller_scratch,
        )  # fmt: skip

    def reserve(self, num_bytes: int) -> None:
        """Give each thread at least so much scratch memory, 64-byte aligned; what was in it is gone."""
        if self._scratch and self._scratch[0].shape[0] >= num_bytes:
            return
        self._scratch = [_aligned(num_bytes) for _ in range(1 + len(self._cores))]
        self._caller_scratch = self._scratch[0].data_ptr()
        for line, memory in enumerate(self._scratch[1:]):
            self._words[line, SCRATCH // 8] = memory.data_ptr()

    def memory(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """`size` elements to work in until the same name is asked for again."""
        buffer = self._buffers.get(name)
        num_bytes = size * dtype.itemsize
        if buffer is None or buffer.shape[0] < num_bytes:
            buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype)

    def items(self) -> tuple[int, int]:
        """How many items were done so far: on our own cores, and on lent ones."""
        done = [int(n) for n in self._words[: len(self._cores), ITEMS // 8]]
        return self._caller_items + sum(done[: self.num_threads - 1]), sum(done[self.num_threads - 1 :])

    def close(self) -> None:
        """End the helpers; from now on the caller works alone."""
        self._end()


def _aligned(num_bytes: int) -> torch.Tensor:
    """uint8 zeros; PyTorch aligns them to 64 bytes."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _help(control: torch.Tensor, lines: torch.Tensor, index: int, borrower: int) -> None:
    _assist(control.data_ptr(), lines.data_ptr() + index * LINE, borrower)
