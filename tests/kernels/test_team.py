"""Threads that share out work: all of it is done, once, whoever comes late."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.cpu.jit import work
from kernels.cpu.team import ASLEEP, Team, claim
from kernels.cpu.vectors import read_i64, write_i64

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


def test_memory_is_kept_while_it_is_enough() -> None:
    team = Team(1)
    first = team.memory("x", torch.float32, 100)
    assert team.memory("x", torch.bfloat16, 100).data_ptr() == first.data_ptr()
    assert team.memory("y", torch.float32, 100).data_ptr() != first.data_ptr()
    assert team.memory("x", torch.float32, 1000).shape == (1000,)


def test_a_team_has_somebody() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)
