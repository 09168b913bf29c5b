"""The text of one choice: token ids in, text out, up to where it stops. Pure but for the detokenizer it is given."""

from __future__ import annotations

from collections.abc import Sequence

from client.detokenizer import IncrementalDetokenizer
from gateway.stops import StopStrings


class OutputText:
    """Counts tokens and turns them into text.

    stop_ids: the tokens that end the request at the scheduler, which then have no text of their own.
    min_tokens: neither a stop token nor a stop string counts among the first this many tokens.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        stop_ids: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        """Every token of the output, the one that ended it included."""
        self.stop_token: int | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found if self._stops else None

    @property
    def stopped(self) -> bool:
        """Nothing that comes now belongs to the output."""
        return self.stop_token is not None or self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """More tokens; returns the text that is certain by now. Tokens behind a stop are ignored."""
        if self._stops is None and len(token_ids) > 1 and self._stop_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            return self._detokenizer.push(token_ids)
        text = ""
        for token in token_ids:
            if self.stopped:
                break
            text += self._push(token)
        return text

    def _push(self, token: int) -> str:
        self.token_ids.append(token)
        count = len(self.token_ids)
        if token in self._stop_ids and count >= self._min_tokens:
            self.stop_token = token
            return self._detokenizer.push([token]) if self._include_stop else ""
        piece = self._detokenizer.push([token])
        if self._stops is None or count <= self._min_tokens:
            return piece
        return self._stops.push(piece) if piece else ""

    def flush(self) -> str:
        """The output has ended: the text that was held back, unless a stop string ended it."""
        if self.stop_string is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        if rest and len(self.token_ids) > self._min_tokens:
            rest = self._stops.push(rest)
            if self._stops.found is not None:
                return rest
            return rest + self._stops.flush()
        return self._stops.flush() + rest
