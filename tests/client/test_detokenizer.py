"""Deltas never show half a character, and together are exactly what decoding everything at once gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BOS, EOS, byte_fallback, byte_level
from tokenizers import Tokenizer

from client.detokenizer import REPLACEMENT, IncrementalDetokenizer

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
TEXT = st.text(st.sampled_from("a é你好🙂👩‍👩‍👧\n�"), max_size=12) | st.text(max_size=12)


def deltas(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(piece) for piece in pieces] + [detokenizer.flush()]


@given(TEXT)
@settings(deadline=None)
def test_text_comes_whole_from_every_start_offset(text: str) -> None:
    ids = list(text.encode())
    for start in range(len(ids) + 1):
        out = deltas(BYTE_LEVEL, [[token] for token in ids[start:]])
        assert "".join(out) == BYTE_LEVEL.decode(ids[start:], skip_special_tokens=True)


@given(TEXT.filter(lambda text: REPLACEMENT not in text))
@settings(deadline=None)
def test_no_replacement_character_is_shown_for_whole_characters(text: str) -> None:
    out = deltas(BYTE_LEVEL, [[token] for token in text.encode()])
    assert not any(REPLACEMENT in delta for delta in out)
    assert "".join(out) == text


def test_character_is_shown_with_its_last_byte_and_no_earlier() -> None:
    assert deltas(BYTE_LEVEL, [[token] for token in "🙂".encode()]) == ["", "", "", "🙂", ""]


def test_character_cut_at_the_end_is_shown_as_replacement_once() -> None:
    assert deltas(BYTE_LEVEL, [[token] for token in "a🙂".encode()[:-1]]) == ["a", "", "", "", REPLACEMENT]


@given(st.lists(st.lists(st.integers(0, EOS), max_size=4), max_size=8))
@settings(deadline=None)
def test_any_ids_in_any_pieces_join_to_their_decoding(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    assert "".join(deltas(BYTE_LEVEL, pieces)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.lists(st.lists(st.sampled_from([*"你🙂é".encode(), 0xFF, *range(256, 261)]), max_size=3), max_size=10))
@settings(deadline=None, max_examples=300)
def test_byte_fallback_ids_join_to_their_decoding(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    assert "".join(deltas(BYTE_FALLBACK, pieces)) == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)


def test_leading_space_is_dropped_only_at_the_beginning() -> None:
    space_a = BYTE_FALLBACK.token_to_id("▁a")
    assert deltas(BYTE_FALLBACK, [[space_a], [space_a], [260], [space_a]]) == ["a", " a", "", " a", ""]


@pytest.mark.parametrize("special", [BOS, EOS])
def test_special_tokens_have_no_text(special: int) -> None:
    assert deltas(BYTE_LEVEL, [[special], [ord("x")], [special]]) == ["", "x", "", ""]
