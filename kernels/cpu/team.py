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
Each helper has a line, too: the semaphore, whether it is ASLEEP, the lent CORE's line or 0, SCRATCH memory, ITEMS done.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
from kernels.cpu.tape import CALL_WORDS, Tape
from kernels.cpu.vectors import read_i64, write_i64

LINE = 64
GATE, TURN, OFFER, STOP, CONTROL_BYTES = (LINE * line for line in range(5))
FUNCTION, ARGUMENTS, PRESENT = OFFER, OFFER + 8, OFFER + 16
OWNER, BORROWER = 0, 8  # of a lent core's line
SEMAPHORE, ASLEEP, CORE, SCRATCH, ITEMS = 0, 32, 40, 48, 56  # of a helper's line
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
    """Offer a piece of work, take part in it, and wait for those who joined. Returns how many items the caller did.

    helpers: address of the addresses of their lines.
    """
    sleeping = 0
    for n in range(num_helpers):
        sleeping += read_shared(read_i64(helpers + 8 * n) + ASLEEP)
    write_i64(control + FUNCTION, function)
    write_i64(control + ARGUMENTS, arguments)
    write_i64(control + PRESENT, 1 + num_helpers - sleeping)
    fetch_add(control + TURN, 1)
    fetch_add(control + GATE, -CLOSED)
    for n in range(num_helpers if sleeping else 0):
        helper = read_i64(helpers + 8 * n)
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


@kernel
def _alone(function, arguments, scratch):
    call(function, arguments, scratch, 0)


@kernel
def _play(control, helpers, num_helpers, calls, num_calls, scratch):
    """The calls of a tape in their order. Returns how many items of shared ones the caller did."""
    items = 0
    for n in range(num_calls):
        at = calls + n * (8 * CALL_WORDS)
        function, arguments = read_i64(at), read_i64(at + 8)
        if read_i64(at + 16) != 0:
            write_i64(arguments, 0)
            items += _lead(control, helpers, num_helpers, function, arguments, scratch)
        else:
            call(function, arguments, scratch, 0)
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
def _make_semaphore(helper):
    make_semaphore(helper + SEMAPHORE)


@kernel
def _post(helper):
    post(helper + SEMAPHORE)


class _Helper:
    """A thread and what it uses: its line, its scratch memory."""

    def __init__(self, control: torch.Tensor, core: int, borrower: int, scratch_bytes: int) -> None:
        self.line = _zeros(LINE)
        self.words = self.line.numpy().view(np.int64)
        self.words[CORE // 8] = core
        self.lent = core != 0
        self.reserve(scratch_bytes)
        _make_semaphore(self.line.data_ptr())
        arguments = (control, self.line, borrower)
        self.thread = threading.Thread(target=_help, args=arguments, name="team", daemon=True)
        self.thread.start()

    def reserve(self, num_bytes: int) -> None:
        self.scratch = _zeros(num_bytes)
        self.words[SCRATCH // 8] = self.scratch.data_ptr()


def _help(control: torch.Tensor, line: torch.Tensor, borrower: int) -> None:
    _assist(control.data_ptr(), line.data_ptr(), borrower)


def _dismiss(control: torch.Tensor, helpers: list[_Helper]) -> None:
    """Returns when no helper runs any more."""
    control.numpy().view(np.int64)[STOP // 8] = 1
    for helper in helpers:
        _post(helper.line.data_ptr())
    for helper in helpers:
        helper.thread.join()


def _zeros(num_bytes: int) -> torch.Tensor:
    """uint8; PyTorch aligns it to 64 bytes."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


class Team:
    """`num_threads` threads, the caller's included, and one for each core that was borrowed. One caller at a time."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self.num_threads = num_threads
        self._control = _zeros(CONTROL_BYTES)
        self._control.numpy().view(np.int64)[GATE // 8] = CLOSED
        self.present = self._control.data_ptr() + PRESENT
        """Address of an int64: about how many take part in the present piece of work."""
        self._scratch = _zeros(LINE)
        self._items = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self.tape: Tape | None = None
        """What those who let the team work add their calls to as well, while they are recorded."""
        self._helpers: list[_Helper] = []
        self._end = weakref.finalize(self, _dismiss, self._control, self._helpers)  # also when the interpreter ends
        self._add([0] * (num_threads - 1), 0)

    def borrow(self, cores: Sequence[int], borrower: int) -> None:
        """One more helper for each of these lent cores, by the addresses of their lines, which must be memory until
        `close`. borrower: this team's number among all who use these lines, not 0."""
        self._add(cores, borrower)

    def _add(self, cores: Sequence[int], borrower: int) -> None:
        for core in cores:
            self._helpers.append(_Helper(self._control, core, borrower, self._scratch.shape[0]))
        self._gather()

    def _gather(self) -> None:
        """What `_lead` wants to know of all threads."""
        self._table = np.array([helper.line.data_ptr() for helper in self._helpers], dtype=np.int64)
        self._everybody = (self._control.data_ptr(), self._table.ctypes.data, len(self._helpers))
        self._scratch_address = self._scratch.data_ptr()

    @property
    def max_threads(self) -> int:
        """How many can take part, on borrowed cores too."""
        return 1 + len(self._helpers)

    def run(self, function: int, arguments: int) -> None:
        """Call work(arguments, scratch, owner), by its address, on all threads that are there; returns when all are
        done."""
        self._items += _lead(*self._everybody, function, arguments, self._scratch_address)

    def alone(self, function: int, arguments: int) -> None:
        """Call work(arguments, scratch, 0), by its address, on the caller's thread."""
        _alone(function, arguments, self._scratch_address)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Calls that are made meanwhile are added to the tape."""
        self.tape = Tape()
        try:
            yield self.tape
            self.tape.finish()
        finally:
            self.tape = None

    def play(self, tape: Tape) -> None:
        """Do what was recorded."""
        self._items += _play(*self._everybody, tape.address, len(tape), self._scratch_address)

    def reserve(self, num_bytes: int) -> None:
        """Give each thread at least so much scratch memory, 64-byte aligned; what was in it is gone."""
        if self._scratch.shape[0] < num_bytes:
            self._scratch = _zeros(num_bytes)
            for helper in self._helpers:
                helper.reserve(num_bytes)
            self._gather()

    def memory(self, name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        """`size` elements to work in until the same name is asked for again."""
        buffer = self._buffers.get(name)
        num_bytes = size * dtype.itemsize
        if buffer is None or buffer.shape[0] < num_bytes:
            buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype)

    def items(self) -> tuple[int, int]:
        """How many items were done so far: by all threads, and on borrowed cores."""
        done = [(int(helper.words[ITEMS // 8]), helper.lent) for helper in self._helpers]
        return self._items + sum(items for items, _ in done), sum(items for items, lent in done if lent)

    def close(self) -> None:
        """End the helpers; from now on the caller works alone."""
        self._end()
        self._helpers.clear()
        self._gather()


@functools.cache
def alone() -> Team:
    """The caller's thread."""
    return Team(1)
