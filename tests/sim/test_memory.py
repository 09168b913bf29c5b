"""The simulated memory notices what it is there to notice."""

from __future__ import annotations

import pytest

from tests.sim.golden import extend_all
from tests.sim.memory import KV, Memory, WrongRead, WrongWrite

TOKENS = [5, 6, 7, 8, 9]
SEQUENCE: list[KV] = [(token, place, extend_all(0, TOKENS[:place])) for place, token in enumerate(TOKENS)]


def written(window: int = 0) -> Memory:
    """Blocks of 2: the sequence lies in blocks 3, 1, 2."""
    memory = Memory((window,), num_blocks=4, block_size=2)
    memory.write(0, [6, 7, 2, 3, 4], SEQUENCE)
    return memory


def test_the_right_read_passes() -> None:
    written().read(0, [3, 1, 2], SEQUENCE, 4, 5, row=0)


@pytest.mark.parametrize("table", [[1, 3, 2], [3, 1, 1], [3, 1, 0], [0, 1, 2]])
def test_a_wrong_table_is_a_wrong_read(table: list[int]) -> None:
    with pytest.raises(WrongRead):
        written().read(0, table, SEQUENCE, 4, 5, row=0)


def test_other_tokens_before_the_same_token_are_a_wrong_read() -> None:
    memory = written()
    memory.write(0, [4], [(9, 4, extend_all(0, [1, 2, 3, 4]))])
    with pytest.raises(WrongRead):
        memory.read(0, [3, 1, 2], SEQUENCE, 4, 5, row=0)


def test_an_unwritten_slot_is_a_wrong_read() -> None:
    memory = Memory((0,), num_blocks=4, block_size=2)
    memory.write(0, [6], SEQUENCE[:1])
    with pytest.raises(WrongRead):
        memory.read(0, [3], SEQUENCE, 1, 2, row=0)


def test_a_window_needs_only_what_it_sees() -> None:
    memory = written(window=3)
    memory.read(0, [0, 1, 2], SEQUENCE, 4, 5, row=0)  # sees positions 2 to 4
    with pytest.raises(WrongRead):
        memory.read(0, [0, 1, 2], SEQUENCE, 3, 5, row=0)  # the first query sees position 1


def test_a_write_into_the_null_block_raises() -> None:
    with pytest.raises(WrongWrite):
        written().write(0, [1], SEQUENCE[:1])
