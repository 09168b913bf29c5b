"""The checksum of both planes: the same from any history of changes, another for any difference."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocol.digest import TableDigest, mix

ROWS = 4
NOWHERE = np.zeros(ROWS, dtype=np.int64)


def digest_of(entries: list[tuple[int, int, int, int]], positions: list[int]) -> int:
    """entries: (row, group, index, id)."""
    digest = TableDigest(ROWS)
    for row, group, index, block_id in entries:
        digest.add(np.array([row]), group, np.array([index]), np.array([block_id]))
    return digest.value(np.array(positions, dtype=np.int64))


ENTRIES = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, 1), st.integers(0, 9), st.integers(0, 50)),
    unique_by=lambda entry: entry[:3],
    max_size=12,
)


@given(ENTRIES, st.randoms(use_true_random=False))
def test_the_order_of_changes_does_not_matter(entries: list[tuple[int, int, int, int]], random: object) -> None:
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digest_of(entries, [1, 2, 3, 4]) == digest_of(shuffled, [1, 2, 3, 4])


@given(ENTRIES)
def test_what_was_added_and_removed_leaves_nothing(entries: list[tuple[int, int, int, int]]) -> None:
    digest = TableDigest(ROWS)
    for change in (digest.add, digest.remove):
        for row, group, index, block_id in entries:
            change(np.array([row]), group, np.array([index]), np.array([block_id]))
    assert digest.value(NOWHERE) == 0


@given(ENTRIES, st.integers(0, ROWS - 1))
def test_a_cleared_row_is_as_if_it_had_never_been(entries: list[tuple[int, int, int, int]], row: int) -> None:
    digest = TableDigest(ROWS)
    for owner, group, index, block_id in entries:
        digest.add(np.array([owner]), group, np.array([index]), np.array([block_id]))
    digest.clear_row(row)
    assert digest.value(NOWHERE) == digest_of([entry for entry in entries if entry[0] != row], [0] * ROWS)


def test_every_difference_shows() -> None:
    base = [(0, 0, 0, 5), (0, 0, 1, 6), (1, 0, 0, 7)]
    others = {
        "swapped within a row": [(0, 0, 0, 6), (0, 0, 1, 5), (1, 0, 0, 7)],
        "swapped between rows": [(0, 0, 0, 7), (0, 0, 1, 6), (1, 0, 0, 5)],
        "another group": [(0, 1, 0, 5), (0, 0, 1, 6), (1, 0, 0, 7)],
        "another id": [(0, 0, 0, 4), (0, 0, 1, 6), (1, 0, 0, 7)],
        "one less": base[:2],
    }
    values = {digest_of(entries, [4, 2, 0, 0]) for entries in (base, *others.values())}
    assert len(values) == 1 + len(others)


def test_a_position_off_by_one_shows_and_swapped_positions_show() -> None:
    base = [(0, 0, 0, 5), (1, 0, 0, 7)]
    values = {digest_of(base, positions) for positions in ([4, 2, 0, 0], [5, 2, 0, 0], [2, 4, 0, 0], [5, 1, 0, 0])}
    assert len(values) == 4


def test_null_entries_count_for_nothing() -> None:
    assert digest_of([(0, 0, 3, 0)], [0] * ROWS) == 0


def test_the_mix_has_no_collision_among_a_large_table() -> None:
    rows = np.repeat(np.arange(64), 64)
    indices = np.tile(np.arange(64), 64)
    words = np.concatenate([mix(rows, group, indices, rows * 64 + indices + 1) for group in (0, 1)])
    assert len(np.unique(words)) == len(words)
