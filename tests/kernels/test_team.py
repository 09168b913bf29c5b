"""Threads that share out work: all of it is done, once, whoever comes late."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from paged_world import make_queries, make_world

from kernels.cpu.backend import CpuBackend
from kernels.cpu.concurrency import pause, read_shared, write_shared
from kernels.cpu.jit import work
from kernels.cpu.team import ASLEEP, BORROWER, LINE, OWNER, Team, claim
from kernels.cpu.vectors import read_i64, write_i64
from worker.layers.cpu_linear import CpuLinear

DEADLINE_S = 20.0


@work
def mark(a, scratch, owner):
    """a: counter, number of items, address of int64 [items]: adds one to each."""
    items, marks, done = read_i64(a + 8), read_i64(a + 16), 0
    item = claim(a, owner)
    while item < items:
        write_i64(marks + 8 * item, read_i64(marks + 8 * item) + 1)
        done += 1
        item = claim(a, owner)
    return done


@work
def interrupted(a, scratch, owner):
    """a: counter, number of items, a helper's first item or -1. The helper's owner is back in the middle of it, and
    the caller does nothing before."""
    items, done = read_i64(a + 8), 0
    spins = 0
    while owner == 0 and read_shared(a + 16) < 0 and spins < 500_000_000:
        spins += 1
        pause()
    item = claim(a, owner)
    while item < items:
        if owner != 0:
            write_shared(owner, 1)
            write_shared(a + 16, item)
        done += 1
        item = claim(a, owner)
    return done


class LentCore:
    """A line as the owner of a core and its borrowers share it."""

    def __init__(self) -> None:
        self._memory = torch.zeros(LINE, dtype=torch.uint8)
        self.words = self._memory.numpy().view(np.int64)
        self.address = self._memory.data_ptr()

    @property
    def owner(self) -> int:
        return int(self.words[OWNER // 8])

    @owner.setter
    def owner(self, busy: int) -> None:
        self.words[OWNER // 8] = busy

    @property
    def borrower(self) -> int:
        return int(self.words[BORROWER // 8])

    @borrower.setter
    def borrower(self, number: int) -> None:
        self.words[BORROWER // 8] = number


class Borrowing:
    """A team of the caller alone that may use one core of somebody else."""

    def __init__(self, number: int = 7) -> None:
        self.core = LentCore()
        self.team = Team(1)
        self.core.owner = 1
        self.team.borrow([self.core.address], number)
        self._marks = np.zeros(2000, dtype=np.int64)

    def work(self) -> bool:
        """Do 2000 items; whether some were done on the lent core."""
        before = self.team.items()[1]
        arguments = np.array([0, len(self._marks), self._marks.ctypes.data], dtype=np.int64)
        self._marks[:] = 0
        self.team.run(mark.address, arguments.ctypes.data)
        assert (self._marks == 1).all()
        return self.team.items()[1] > before

    def sleeps(self) -> bool:
        return bool(self.team._helpers[0].words[ASLEEP // 8])


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.001)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_item_is_done_once(num_threads: int) -> None:
    team = Team(num_threads)
    for items in (0, 1, 2, 1000, 5):
        for _ in range(20):
            marks = np.zeros(items, dtype=np.int64)
            arguments = np.array([0, items, marks.ctypes.data], dtype=np.int64)
            team.run(mark.address, arguments.ctypes.data)
            assert (marks == 1).all()


def test_helpers_take_part_and_sleep_and_are_woken() -> None:
    team = Team(2)
    items = 200_000
    marks = np.zeros(items, dtype=np.int64)

    def helped() -> bool:
        alone = team._items
        arguments = np.array([0, items, marks.ctypes.data], dtype=np.int64)
        team.run(mark.address, arguments.ctypes.data)
        return team._items - alone < items

    wait_for(helped, "the helper never helped")
    for _ in range(2):
        wait_for(lambda: team._helpers[0].words[ASLEEP // 8], "the helper does not sleep")
        wait_for(helped, "the helper did not wake")
    assert (marks == marks[0]).all()
    assert team.items() == (items * marks[0], 0)


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("team")}


def test_helpers_end_with_their_team() -> None:
    gc.collect()
    before = helpers()
    team = Team(3)
    assert len(helpers() - before) == 2
    del team
    gc.collect()
    assert helpers() <= before


def test_a_closed_team_is_the_caller() -> None:
    before = helpers()
    team = Team(3)
    team.close()
    team.close()
    assert helpers() <= before
    marks = np.zeros(10, dtype=np.int64)
    arguments = np.array([0, 10, marks.ctypes.data], dtype=np.int64)
    team.run(mark.address, arguments.ctypes.data)
    assert (marks == 1).all()
    assert team._items == 10


def test_a_core_is_used_only_while_its_owner_is_idle() -> None:
    borrowing = Borrowing()
    assert not any(borrowing.work() for _ in range(100))
    for _ in range(3):
        borrowing.core.owner = 0
        wait_for(borrowing.work, "the idle core is not used")
        borrowing.core.owner = 1
        wait_for(borrowing.sleeps, "the helper does not leave")
        assert not any(borrowing.work() for _ in range(100))
        assert borrowing.core.borrower == 0
    borrowing.team.close()


def test_a_core_has_one_borrower() -> None:
    borrowing = Borrowing(number=7)
    borrowing.core.borrower = 3
    borrowing.core.owner = 0
    assert not any(borrowing.work() for _ in range(100))
    borrowing.core.borrower = 0

    def ours() -> bool:
        return borrowing.work() and borrowing.core.borrower == 7

    wait_for(ours, "the core that was given back is not used")
    wait_for(borrowing.sleeps, "the helper stays although there is nothing to do")
    assert borrowing.core.borrower == 0
    borrowing.team.close()


def test_a_helper_whose_owner_is_back_claims_no_further_item() -> None:
    borrowing = Borrowing()
    borrowing.core.owner = 0
    arguments = np.array([0, 100, -1], dtype=np.int64)
    borrowing.team.run(interrupted.address, arguments.ctypes.data)
    assert borrowing.team.items() == (100, 1)
    borrowing.team.close()


def test_results_do_not_tell_whose_cores_were_used() -> None:
    """The owner comes and goes as it likes; bits stay the same, and nothing waits for it."""
    borrowing, over = Borrowing(), threading.Event()
    torch.manual_seed(0)
    weight, x = torch.randn(480, 96), torch.randn(300, 96)
    expected = CpuLinear(weight)(x)
    layer = CpuLinear(weight, team=borrowing.team)
    world = make_world([90, 40, 300, 7], heads=(4, 2), head_dim=64, block_size=16, dtype=torch.bfloat16)
    queries, metadata = make_queries(world, 150), world.metadata([90, 1, 58, 1])
    attended = world.attend(CpuBackend(1), queries, metadata)
    backend = CpuBackend(team=borrowing.team)
    flips = 0

    def come_and_go() -> None:
        nonlocal flips
        random = np.random.default_rng(1)
        while not over.wait(float(random.exponential(0.0005))):
            borrowing.core.owner = flips % 2
            flips += 1

    owner = threading.Thread(target=come_and_go)
    owner.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while flips < 100 or not borrowing.team.items()[1]:
            assert torch.equal(layer(x), expected)
            assert torch.equal(world.attend(backend, queries, metadata), attended)
            assert time.monotonic() < deadline, f"{flips} flips, {borrowing.team.items()[1]} items on the lent core"
    finally:
        over.set()
        owner.join()
    borrowing.team.close()


def test_memory_is_kept_while_it_is_enough() -> None:
    team = Team(1)
    first = team.memory("x", torch.float32, 100)
    assert team.memory("x", torch.bfloat16, 100).data_ptr() == first.data_ptr()
    assert team.memory("y", torch.float32, 100).data_ptr() != first.data_ptr()
    assert team.memory("x", torch.float32, 1000).shape == (1000,)


def test_a_team_has_somebody() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)
