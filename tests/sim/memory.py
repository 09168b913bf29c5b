"""The KV memory of a simulated worker: each slot remembers whose KV it holds, so that any wrong read is noticed.

A slot holds (token, position, hash of all tokens before it). Fresh memory holds nothing; reading nothing is an error.
"""

from __future__ import annotations

KV = tuple[int, int, int]
"""(token, position, hash of all tokens before it)"""


class WrongRead(AssertionError):
    """A query saw a slot that holds something else than the key and value at that position of its own sequence."""


class WrongWrite(AssertionError):
    """A write into the null block."""


class Memory:
    """Slots of one worker, per cache group. All groups share the block ids but not the contents."""

    def __init__(self, windows: tuple[int, ...], num_blocks: int, block_size: int):
        self.windows = windows
        self.block_size = block_size
        self._blocks: list[list[list[KV | None]]] = [[[None] * block_size for _ in range(num_blocks)] for _ in windows]

    def write(self, group: int, slots: list[int], values: list[KV]) -> None:
        """Write KV into slots. Raises WrongWrite for a slot of the null block."""
        blocks, size = self._blocks[group], self.block_size
        for slot, value in zip(slots, values, strict=True):
            if slot < size:
                raise WrongWrite(f"group {group}: {value} into slot {slot} of the null block")
            blocks[slot // size][slot % size] = value

    def read(self, group: int, table: list[int], sequence: list[KV], first: int, end: int, row: int) -> None:
        """The queries at positions [first, end) attend: every position one of them sees must be that of `sequence`.

        `table`: the row's block ids. Raises WrongRead.
        """
        window, size, blocks = self.windows[group], self.block_size, self._blocks[group]
        start = max(0, first - window + 1) if window else 0
        for index in range(start // size, (end - 1) // size + 1):
            low, high = max(start, index * size), min(end, (index + 1) * size)
            block_id = table[index]
            held = blocks[block_id][low - index * size : high - index * size]
            if block_id == 0 or held != sequence[low:high]:
                raise WrongRead(
                    f"group {group}, row {row}, queries {first} to {end - 1}: block {block_id} holds {held} at "
                    f"positions {low} to {high - 1}, not {sequence[low:high]}"
                )
