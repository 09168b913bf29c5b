"""Recorded calls: played in order, with the words that vary, by all threads where they are shared."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.jit import work
from kernels.cpu.tape import LINE, Tape
from kernels.cpu.team import Team, claim
from kernels.cpu.vectors import read_i64, write_i64


@work
def double_and_add(a, scratch, owner):
    """a: rows, address of an int64 [rows], what is added: each becomes twice itself and that."""
    for row in range(read_i64(a)):
        at = read_i64(a + 8) + 8 * row
        write_i64(at, 2 * read_i64(at) + read_i64(a + 16))
    return 1


@work
def count_up(a, scratch, owner):
    """a: counter, rows, address of an int64 [rows]: each is one more, an item each."""
    done = 0
    item = claim(a, owner)
    while item < read_i64(a + 8):
        at = read_i64(a + 16) + 8 * item
        write_i64(at, read_i64(at) + 1)
        done += 1
        item = claim(a, owner)
    return done


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_calls_are_played_in_order_for_the_rows_there_are(num_threads: int) -> None:
    team = Team(num_threads)
    data = np.zeros(40, dtype=np.int64)
    tape = Tape()
    for added in (3, 5):
        tape.add(double_and_add.address, words(40, data.ctypes.data, added), rows=0, name="add", varying=[2])
        tape.add(count_up.address, words(99, 40, data.ctypes.data), rows=1, shared=True)
    tape.finish()
    assert len(tape) == 4
    team.play(tape)
    assert data.tolist() == [2 * (3 + 1) + 5 + 1] * 40, "recorded counters do not matter"
    tape.put_rows(7)
    data[:] = 0
    for _ in range(2):
        team.play(tape)
    once = 2 * (3 + 1) + 5 + 1
    assert data.tolist() == [4 * once + once] * 7 + [0] * 33
    team.close()


def test_words_of_a_name_are_written_and_read_together() -> None:
    tape = Tape()
    for first in (10, 20):
        tape.add(double_and_add.address, words(first, first + 1, first + 2), name="these", varying=[2, 0])
        tape.add(double_and_add.address, words(1, 2, 3), name="those", varying=[1])
    tape.finish()
    assert tape.get("these").tolist() == [[12, 10], [22, 20]]
    tape.put("these", words(7, 8))
    assert tape.get("these").tolist() == [[7, 8], [7, 8]]
    assert tape.get("those").tolist() == [[2], [2]]


def test_arguments_are_copies_on_lines_of_their_own() -> None:
    tape = Tape()
    arguments = words(1, 2, 3)
    for _ in range(3):
        tape.add(double_and_add.address, arguments)
    arguments[:] = 0
    tape.finish()
    calls = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 9).from_address(tape.address)).reshape(3, 3)
    assert (calls[:, 1] % (8 * LINE)).tolist() == [0, 0, 0], "two threads never write to one line"
    assert len(set(calls[:, 1].tolist())) == 3


def test_a_recording_that_fails_leaves_nothing_behind() -> None:
    team = Team(1)
    with pytest.raises(RuntimeError, match="midway"), team.recording() as tape:
        tape.add(double_and_add.address, words(0, 0, 0))
        raise RuntimeError("midway")
    assert team.tape is None
