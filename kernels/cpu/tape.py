"""Compiled calls in a row, recorded once and played with nothing of Python between them. Knows no kernel.

What a step calls is the same for every step but for a few words: how many rows there are, and what a cache group's
attention is told of them. So the calls of one step are recorded, with copies of their arguments; a replay writes those
few words into all of them and plays the lot. Addresses stay as recorded: what they point at must stay where it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

LINE = 8  # words: each call's arguments begin on a line of their own, since threads write into some of them
CALL_WORDS = 3


class Tape:
    """Calls of `work` (kernels.cpu.jit). Recorded by `add`, ended by `finish`, played by `team.Team.play`."""

    def __init__(self) -> None:
        self._blocks: list[Words] = []
        self._calls: list[tuple[int, bool]] = []
        self._rows: list[int] = []
        self._varying: dict[Hashable, list[Words]] = {}
        self._kept: list[Any] = []
        self._end = 0

    def add(
        self,
        function: int,
        arguments: Words,
        *,
        rows: int | None = None,
        shared: bool = False,
        name: Hashable = None,
        varying: Sequence[int] = (),
        keep: object = None,
    ) -> None:
        """function: address of the work; arguments: copied. rows: index of the word that says how many rows there are,
        if there is one.

        shared: the team's threads share it out, by a counter of items in word 0; else the caller does it alone.
        varying: indices of words that `put` and `get` name by `name`, as all calls of the same name do. keep: what the
        arguments point at.
        """
        block = np.zeros(-(-len(arguments) // LINE) * LINE, dtype=np.int64)
        block[: len(arguments)] = arguments
        self._blocks.append(block)
        self._calls.append((function, shared))
        if rows is not None:
            self._rows.append(self._end + rows)
        if name is not None:
            self._varying.setdefault(name, []).append(self._end + np.asarray(varying))
        self._kept.append(keep)
        self._end += len(block)

    def finish(self) -> None:
        """Nothing more is added."""
        memory = np.zeros(self._end + LINE, dtype=np.int64)
        start = -memory.ctypes.data // 8 % LINE
        self._words = memory[start : start + self._end]
        self._words[:] = np.concatenate(self._blocks) if self._blocks else 0
        self._rows_at = np.array(self._rows, dtype=np.int64)
        self._places = {name: np.stack(places) for name, places in self._varying.items()}
        table, at = [], self._words.ctypes.data
        for block, (function, shared) in zip(self._blocks, self._calls, strict=True):
            table.append((function, at, int(shared)))
            at += block.nbytes
        self._table = np.array(table, dtype=np.int64).reshape(-1, CALL_WORDS)
        self._blocks.clear()

    def __len__(self) -> int:
        """Number of calls."""
        return len(self._calls)

    @property
    def address(self) -> int:
        """Of int64 [len, CALL_WORDS]: function, arguments, whether it is shared."""
        return int(self._table.ctypes.data)

    def put_rows(self, rows: int) -> None:
        """Say to all calls how many rows there are: at most as many as were recorded."""
        self._words[self._rows_at] = rows

    def put(self, name: Hashable, values: Words) -> None:
        """The varying words of all calls of this name."""
        self._words[self._places[name]] = values

    def get(self, name: Hashable) -> Words:
        """int64 [calls of this name, varying words]."""
        return self._words[self._places[name]]
