"""The checksum by which scheduler and worker prove, every step, that their block tables and positions agree.

digest = Σ mix(row, group, index, id) over non-null table entries + Σ w(row) · num_computed(row), modulo 2⁶⁴.
A sum, so order does not matter and each change costs what it changes; a share is kept per row: forgetting one is O(1).
`mix` is two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014). Each plane keeps one over its own tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_MASK = (1 << 64) - 1


_GAMMA, _FIRST, _SECOND = (
    np.array(word, dtype=np.uint64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_27, _30, _31, _32 = (np.array(bits, dtype=np.uint64) for bits in (27, 30, 31, 32))


def _splitmix(words: U64) -> U64:
    x = words + _GAMMA
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def mix(rows: NDArray[np.integer], group: int, indices: NDArray[np.integer], ids: NDArray[np.integer]) -> U64:
    """uint64 [n]: one well-mixed word per table entry (all arguments int [n], non-negative, below 2³²)."""
    return _mix_with(_row_keys(rows, group), indices, ids)


def _row_keys(rows: NDArray[np.integer], group: int) -> U64:
    return _splitmix(rows.astype(np.uint64) | np.uint64(group << 32))


def _mix_with(keys: U64, indices: NDArray[np.integer], ids: NDArray[np.integer]) -> U64:
    words = indices.astype(np.uint64)
    words <<= _32
    words |= ids.astype(np.uint64)
    words ^= keys
    return _splitmix(words)


class TableDigest:
    """Digest of one replica's tables. `share[r]`: uint64, the part of the table entries of row r."""

    def __init__(self, num_rows: int, include_positions: bool = True):
        self.share: U64 = np.zeros(num_rows, dtype=np.uint64)
        self._total = 0
        self._include_positions = include_positions
        self._weight: U64 = _splitmix(np.arange(num_rows, dtype=np.uint64) ^ np.uint64(0xA5A5A5A5)) | np.uint64(1)
        self._keys: list[U64] = []
        """By cache group: the keys of all rows, made when the group is first seen."""

    def add(
        self, rows: NDArray[np.integer], group: int, indices: NDArray[np.integer], ids: NDArray[np.integer]
    ) -> None:
        """Entries (row, index) := id appear. Null entries (id 0) count for nothing."""
        self._change(rows, group, indices, ids, remove=False)

    def remove(
        self, rows: NDArray[np.integer], group: int, indices: NDArray[np.integer], ids: NDArray[np.integer]
    ) -> None:
        """Entries (row, index), which held id, become null."""
        self._change(rows, group, indices, ids, remove=True)

    def _change(
        self,
        rows: NDArray[np.integer],
        group: int,
        indices: NDArray[np.integer],
        ids: NDArray[np.integer],
        remove: bool,
    ) -> None:
        words = _mix_with(self._keys_of(group)[rows], indices, ids)
        words *= ids != 0
        if remove:
            np.negative(words, out=words)
        np.add.at(self.share, rows, words)
        self._total = (self._total + int(words.sum())) & _MASK

    def _keys_of(self, group: int) -> U64:
        while len(self._keys) <= group:
            self._keys.append(_row_keys(np.arange(len(self.share)), len(self._keys)))
        return self._keys[group]

    def clear_row(self, row: int) -> None:
        """Forget all entries of a row."""
        self._total = (self._total - int(self.share[row])) & _MASK
        self.share[row] = 0

    def value(self, num_computed: NDArray[np.int64]) -> int:
        """The digest, given num_computed int64 [num_rows] (0 for rows not in use)."""
        if not self._include_positions:
            return self._total
        return (self._total + int(self._weight @ num_computed.view(np.uint64))) & _MASK
