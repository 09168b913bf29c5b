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
from kernels.cpu.team import PATIENCE, Team
from kernels.cpu.vectors import fetch_add, read_i64, write_i64

DEADLINE_S = 20.0


@work
def mark(a, scratch):
    """a: counter, number of items, address of int64 [items]: adds one to each. scratch counts calls."""
    fetch_add(scratch, 1)
    items, marks = read_i64(a + 8), read_i64(a + 16)
    item = fetch_add(a, 1)
    while item < items:
        write_i64(marks + 8 * item, read_i64(marks + 8 * item) + 1)
        item = fetch_add(a, 1)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.001)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_item_is_done_once(num_threads: int) -> None:
    team = Team(num_threads, 64)
    for items in (0, 1, 2, 1000, 5):
        for _ in range(20):
            marks = np.zeros(items, dtype=np.int64)
            arguments = np.array([0, items, marks.ctypes.data], dtype=np.int64)
            team.run(mark.address, arguments.ctypes.data)
            assert (marks == 1).all()


def test_helpers_take_part_and_leave_and_come_back() -> None:
    team = Team(2, 64)
    helped = team._memory[1].numpy().view(np.int64)
    items = 200_000
    marks = np.zeros(items, dtype=np.int64)

    def run() -> bool:
        arguments = np.array([0, items, marks.ctypes.data], dtype=np.int64)
        team.run(mark.address, arguments.ctypes.data)
        return helped[0] > 0

    wait_for(run, "the helper never helped")
    wait_for(team._helpers[0].done, f"the helper did not leave after {PATIENCE} turns")
    helped[0] = 0
    wait_for(run, "the helper did not come back")
    assert (marks == marks[0]).all()


def test_helpers_end_with_their_team() -> None:
    def helpers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("team")]

    gc.collect()
    before = set(helpers())
    team = Team(3, 64)
    ours = [thread for thread in helpers() if thread not in before]
    assert len(ours) == 2
    del team
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in ours), "helpers outlive their team")


def test_memory_is_kept_while_it_is_enough() -> None:
    team = Team(1, 64)
    first = team.memory("x", torch.float32, 100)
    assert team.memory("x", torch.bfloat16, 100).data_ptr() == first.data_ptr()
    assert team.memory("y", torch.float32, 100).data_ptr() != first.data_ptr()
    assert team.memory("x", torch.float32, 1000).shape == (1000,)


def test_a_team_has_somebody() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Team(0, 64)
