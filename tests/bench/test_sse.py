"""Tokens are counted from whatever a server says about its chunks."""

from __future__ import annotations

import json

import pytest

from bench.sse import CompletionStream
from bench.target import TargetError


def data(**event: object) -> str:
    return f"data: {json.dumps(event)}"


def counts(stream: CompletionStream, *lines: str) -> list[int]:
    return [stream.feed(line) for line in lines]


def chunk(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


def test_running_usage_wins_and_counts_tokens_whose_text_is_held_back():
    stream = CompletionStream()
    assert counts(
        stream,
        data(**chunk("a"), usage={"completion_tokens": 1}),
        "",
        data(**chunk(""), usage={"completion_tokens": 2}),
        ": keep-alive",
        data(**chunk("bcd", finish_reason="length"), usage={"completion_tokens": 5}),
        data(choices=[], usage={"completion_tokens": 5}),
        "data: [DONE]",
    ) == [1, 0, 1, 0, 3, 0, 0]
    assert (stream.num_tokens, stream.done, stream.finish_reason) == (5, True, "length")


def test_token_ids_are_counted_where_there_is_no_usage():
    stream = CompletionStream()
    assert counts(stream, data(**chunk("ab", token_ids=[5, 6])), data(**chunk("", token_ids=[]))) == [2, 0]


def test_a_chunk_with_text_is_a_token_and_final_usage_adds_what_was_missed():
    stream = CompletionStream()
    assert counts(
        stream,
        data(**chunk("a"), usage=None),
        data(**chunk("")),
        data(**chunk("b")),
        data(choices=[], usage={"completion_tokens": 4}),
    ) == [1, 0, 1, 2]
    assert stream.num_tokens == 4
    assert not stream.done


def test_an_error_event_and_a_broken_chunk_are_failures():
    with pytest.raises(TargetError, match="engine is dead"):
        CompletionStream().feed(data(error={"message": "engine is dead"}))
    with pytest.raises(TargetError, match="no JSON"):
        CompletionStream().feed("data: {oops")
