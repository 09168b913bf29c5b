"""Log-probabilities as they travel (`LogprobsLists`) and as a reader wants them: places, each with its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import pack, unpack
from protocol.codec import MalformedFrame
from protocol.messages import LogprobsLists

FLOAT32 = np.dtype("<f4")


class TokenLogprobs(NamedTuple):
    """What is told about one token. `top`: the most probable tokens and their log-probabilities, descending; the token
    itself may be among them. `rank`: 1 if no token is more probable."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Logprobs:
    """Log-probabilities at n places, read from the wire. Raises MalformedFrame when the arrays do not fit together."""

    def __init__(self, lists: LogprobsLists):
        self.counts = unpack(lists.counts, "counts")
        self.ranks = unpack(lists.ranks, "ranks")
        self.token_ids = unpack(lists.token_ids, "token_ids")
        if len(lists.logprobs) != 4 * len(self.token_ids):
            raise MalformedFrame(f"{len(lists.logprobs)} bytes of logprobs for {len(self.token_ids)} tokens")
        self.values: NDArray[np.float32] = np.frombuffer(lists.logprobs, dtype=FLOAT32)
        if len(self.ranks) != len(self.counts) or (len(self.counts) and self.counts.min() < 0):
            raise MalformedFrame(f"{len(self.counts)} counts, {len(self.ranks)} ranks, or a negative count")
        self.ends: NDArray[np.int64] = np.cumsum(self.counts, dtype=np.int64)
        total = int(self.ends[-1]) if len(self.ends) else 0
        if total != len(self.token_ids):
            raise MalformedFrame(f"{len(self.token_ids)} candidates instead of {total}")

    def __len__(self) -> int:
        """Places."""
        return len(self.counts)

    def at(self, place: int) -> TokenLogprobs | None:
        """What is told about one place; None: nothing."""
        count, end = int(self.counts[place]), int(self.ends[place])
        if count == 0:
            return None
        ids, values = self.token_ids[end - count : end].tolist(), self.values[end - count : end].tolist()
        top = tuple(zip(ids[1:], values[1:], strict=True))
        return TokenLogprobs(ids[0], values[0], int(self.ranks[place]), top)

    def select(self, places: NDArray[np.integer]) -> LogprobsLists:
        """These places (int [m]), in this order."""
        counts = self.counts[places].astype(np.int64)
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        index = np.repeat(self.ends[places] - counts, counts) + within
        return lists_of(counts, self.ranks[places], self.token_ids[index], self.values[index])

    def starting_at(self, place: int) -> LogprobsLists:
        """All places from this one on."""
        return self.select(np.arange(place, len(self)))


def lists_of(
    counts: NDArray[np.integer],
    ranks: NDArray[np.integer],
    token_ids: NDArray[np.integer],
    values: NDArray[np.floating],
) -> LogprobsLists:
    """counts and ranks int [n]; token_ids int and values float of all candidates, [sum of counts]."""
    return LogprobsLists(pack(counts), pack(ranks), pack(token_ids), values.astype(FLOAT32).tobytes())


def nothing(places: int) -> LogprobsLists:
    """Places of which nothing is told."""
    return LogprobsLists(bytes(4 * places), bytes(4 * places), b"", b"")


def join(parts: Sequence[LogprobsLists]) -> LogprobsLists:
    """The places of all parts, one after the other."""
    return LogprobsLists(
        b"".join(part.counts for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.token_ids for part in parts),
        b"".join(part.logprobs for part in parts),
    )
