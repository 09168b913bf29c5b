"""The text of one choice: the same however its tokens arrive, up to its stop and no further."""

from __future__ import annotations

import pytest

from client.tokenizer import Tokenizer
from gateway.output import OutputText
from tests.tiny_model import IM_END, tiny_model

TOKENIZER = Tokenizer(tiny_model())


def ids(text: str) -> list[int]:
    """One token a byte, as the tiny model has them."""
    return list(text.encode())


def run(batches: list[list[int]], **options: object) -> tuple[str, OutputText]:
    output = OutputText(TOKENIZER.detokenizer(), **options)  # type: ignore[arg-type]
    text = ""
    for batch in batches:
        text += output.push(batch)
        if output.stopped:
            break
    return text + output.flush(), output


def in_batches(tokens: list[int]) -> list[list[list[int]]]:
    """The tokens in batches of 1, 2, 3 … and all at once."""
    return [[tokens[i : i + size] for i in range(0, len(tokens), size)] for size in range(1, len(tokens) + 1)]


@pytest.mark.parametrize("text", ["ABCDEFGHIJKL", "日本DEFGHIJ語", "🦙DEFGHIJ🦙"])
def test_a_stop_string_over_token_borders(text: str) -> None:
    kept = text.partition("DEFGHIJ")[0]
    for batches in in_batches(ids(text)):
        found, output = run(batches, stops=["DEFGHIJ"])
        assert (found, output.stop_string) == (kept, "DEFGHIJ")
        assert len(output.token_ids) == len((kept + "DEFGHIJ").encode()), "the token that completes it is the last"


def test_characters_of_several_tokens_are_whole_and_a_cut_one_shows() -> None:
    tokens = ids("añ日🦙b")
    for length in range(len(tokens) + 1):
        for batches in in_batches(tokens[:length]) or [[]]:
            assert run(batches)[0] == TOKENIZER.decode(tokens[:length])
            assert run(batches, stops=["never"])[0] == TOKENIZER.decode(tokens[:length])


def test_text_held_for_a_stop_string_comes_when_the_output_ends() -> None:
    for batches in in_batches(ids("ABCDEFGHI")):
        assert run(batches, stops=["DEFGHIJ"])[0] == "ABCDEFGHI"


def test_a_stop_token_has_no_text_and_ends_it() -> None:
    for batches in in_batches([*ids("ab"), ord("X"), *ids("cd")]):
        found, output = run(batches, stop_ids=frozenset({ord("X")}))
        assert (found, output.stop_token, output.token_ids) == ("ab", ord("X"), ids("abX"))
        assert run(batches, stop_ids=frozenset({ord("X")}), include_stop=True)[0] == "abX"


def test_nothing_stops_before_min_tokens() -> None:
    for batches in in_batches(ids("XabXcXd")):
        assert run(batches, stop_ids=frozenset({ord("X")}), min_tokens=4)[0] == "Xab", "the 4th token may stop it"
        assert run(batches, stop_ids=frozenset({ord("X")}), min_tokens=5)[0] == "XabXc"
        assert run(batches, stops=["X"], min_tokens=4)[0] == "XabXc", "text of the first 4 tokens is not searched"


def test_special_tokens_have_no_text() -> None:
    assert run([[*ids("a"), IM_END, *ids("b")]])[0] == "ab"
