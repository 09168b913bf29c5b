"""Log-probabilities packed, taken apart and put together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arrays import pack
from protocol.codec import MalformedFrame
from protocol.logprobs import Logprobs, TokenLogprobs, join, lists_of, nothing
from protocol.messages import LogprobsLists

CANDIDATE = st.tuples(st.integers(0, 1000), st.floats(-100, 0, width=32))
PLACE = st.none() | st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 1000),
    logprob=st.floats(-100, 0, width=32),
    rank=st.integers(1, 1000),
    top=st.lists(CANDIDATE, max_size=4).map(tuple),
)


def packed(places: list[TokenLogprobs | None]) -> LogprobsLists:
    candidates = [[(place.token_id, place.logprob), *place.top] if place else [] for place in places]
    flat = [candidate for part in candidates for candidate in part]
    return lists_of(
        np.array([len(part) for part in candidates], dtype=np.int64),
        np.array([place.rank if place else 0 for place in places], dtype=np.int64),
        np.array([token for token, _ in flat], dtype=np.int64),
        np.array([value for _, value in flat], dtype=np.float32),
    )


def unpacked(lists: LogprobsLists) -> list[TokenLogprobs | None]:
    read = Logprobs(lists)
    return [read.at(place) for place in range(len(read))]


@given(st.lists(PLACE, max_size=6), st.lists(PLACE, max_size=6), st.data())
def test_places_survive_packing_selection_and_joining(
    first: list[TokenLogprobs | None], second: list[TokenLogprobs | None], data: st.DataObject
) -> None:
    assert unpacked(packed(first)) == first
    both = join([packed(first), nothing(2), packed(second)])
    places = [*first, None, None, *second]
    assert unpacked(both) == places
    chosen = data.draw(st.lists(st.integers(0, len(places) - 1), max_size=8))
    assert unpacked(Logprobs(both).select(np.array(chosen, dtype=np.int64))) == [places[i] for i in chosen]
    start = data.draw(st.integers(0, len(places)))
    assert unpacked(Logprobs(both).starting_at(start)) == places[start:]


@pytest.mark.parametrize(
    "lists",
    [
        LogprobsLists(pack([1]), pack([1]), b"", b""),
        LogprobsLists(pack([1]), pack([1]), pack([5]), b""),
        LogprobsLists(pack([1]), b"", pack([5]), bytes(4)),
        LogprobsLists(pack([2, -1]), pack([1, 1]), pack([5]), bytes(4)),
        LogprobsLists(b"abc", b"", b"", b""),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(lists: LogprobsLists) -> None:
    with pytest.raises(MalformedFrame):
        Logprobs(lists)
