"""What the prefix map held once and holds no more, as far as a bounded memory reaches. Pure.

Only those who ask why a prefix did not hit read it; to keep it costs one dict entry for each block evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Literal

REMEMBERED = 32_768

Departure = Literal["evicted", "lost", "withdrawn"]
"""evicted: its memory was given to other content. lost: its worker died. withdrawn: it held no valid results."""


class EvictionMemory:
    """The last keys that left the map, and why. `most`: how many; the oldest are forgotten."""

    def __init__(self, most: int = REMEMBERED):
        self._most = most
        self._why: dict[bytes, Departure] = {}
        self.overflowed = False
        """Whether anything was forgotten, so that a key that is not here may have been in the map once."""

    def __len__(self) -> int:
        return len(self._why)

    def add(self, key: bytes, why: Departure) -> None:
        """This content can be found no more."""
        memory = self._why
        memory.pop(key, None)  # so that it becomes the newest
        memory[key] = why
        if len(memory) > self._most:
            del memory[next(iter(memory))]
            self.overflowed = True

    def add_all(self, keys: Iterable[bytes], count: int, why: Departure) -> None:
        """The same for `count` keys; of more than fit only the last are looked at."""
        if count > self._most:
            self.overflowed = True
        for key in islice(keys, max(0, count - self._most), None):
            self.add(key, why)

    def why(self, key: bytes) -> Departure | None:
        """How it left; None: it never was in the map, or that is forgotten."""
        return self._why.get(key)
