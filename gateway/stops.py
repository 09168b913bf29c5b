"""Stop strings in a text that comes in pieces. Pure.

The text ends at the first character with which some stop string is complete, however it was cut into pieces; of several
that are complete there, the longest counts. Text that may be the beginning of a stop string is held back until it is
known not to be, so no part of a stop string is ever given out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The search over one output. stops: not empty strings; include: whether the text keeps the stop string."""

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text; nothing may be pushed after that."""

    def push(self, piece: str) -> str:
        """More text; returns what is certain to belong to the output."""
        text = self._held + piece
        end: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (end is None or (start + len(stop), start) < end):
                end, self.found = (start + len(stop), start), stop
        if end is not None:
            self._held = ""
            return text[: end[0] if self._include else end[1]]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """No more text comes: what was held back belongs to the output after all."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
