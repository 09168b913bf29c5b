"""Stop strings: the same text however it is cut, and nothing of a stop string in it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopStrings


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is given out for each piece (and at the end), and the stop string found."""
    search = StopStrings(stops, include)
    given_out = []
    for piece in pieces:
        given_out.append(search.push(piece))
        if search.found is not None:
            return given_out, search.found
    return [*given_out, search.flush()], None


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end at which a stop string is complete, the longest of those there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def every_split(text: str) -> list[list[str]]:
    cuts = range(1, len(text))
    return [
        [text[a:b] for a, b in zip((0, *chosen), (*chosen, len(text)), strict=True)]
        for size in range(len(text))
        for chosen in combinations(cuts, size)
    ]


@pytest.mark.parametrize("text", ["ABCDEFGHIJ", "ABCDEFGHIJKL", "DEFGHIJ", "ABCDEFDEFGHIJ"])
def test_no_part_of_the_stop_string_is_given_out_however_it_is_cut(text: str) -> None:
    for pieces in every_split(text):
        given_out, found = run(pieces, ["DEFGHIJ"])
        assert ("".join(given_out), found) == (text.partition("DEFGHIJ")[0], "DEFGHIJ"), pieces


def test_text_that_only_began_like_a_stop_string_comes_at_the_end() -> None:
    for pieces in every_split("ABCDEFGHI"):
        given_out, found = run(pieces, ["DEFGHIJ"])
        assert ("".join(given_out), found) == ("ABCDEFGHI", None)


def test_what_is_no_beginning_of_a_stop_string_is_not_held() -> None:
    assert run(["ab", "cd", "xc", "y"], ["cde"])[0] == ["ab", "", "cdx", "cy", ""]


def test_the_stop_string_stays_if_it_is_asked_for() -> None:
    for pieces in every_split("abcSTOPdef"):
        assert "".join(run(pieces, ["STOP"], include=True)[0]) == "abcSTOP"


@given(
    text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_any_split_is_as_one_character_at_a_time(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    given_out, found = run(pieces, stops)
    assert ("".join(given_out), found) == naive(text, stops)
