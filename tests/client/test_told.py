"""Log-probabilities at the client: with their tokens, the prompt's once however often it is told."""

from __future__ import annotations

import pytest

from client import BrokenStream, TokenLogprobs
from client.chunk import Chunk, Completion
from client.stream import Request
from protocol.messages import Usage

TOLD = [TokenLogprobs(token, -0.5, 1, ()) for token in range(6)]


def test_the_prompt_is_told_once_also_after_an_attach() -> None:
    request = Request("r", 0.0)
    request.add_prompt(1, TOLD[1:3])
    request.add_prompt(1, TOLD[1:4])  # from the start again
    request.add_prompt(4, TOLD[4:])
    assert request.prompt_logprobs == [None, *TOLD[1:]]


def test_a_gap_in_the_prompt_is_an_error() -> None:
    request = Request("r", 0.0)
    request.add_prompt(1, TOLD[1:2])
    with pytest.raises(BrokenStream, match="prompt token 2"):
        request.add_prompt(3, TOLD[3:])


def test_a_token_that_comes_twice_keeps_what_was_told_first() -> None:
    request = Request("r", 0.0)
    request.attached = True
    request.add(0, 5, TOLD[5])
    request.add(0, 5)
    request.add(1, 3)
    assert (request.token_ids, request.logprobs) == ([5, 3], [TOLD[5], None])


def test_the_whole_answer_has_what_its_chunks_had() -> None:
    first = Chunk("r", "a", (1,), (0,), logprobs=(TOLD[1],), prompt_logprobs=(None, TOLD[2]))
    last = Chunk("r", "b", (3,), (1,), "stop", Usage(2, 2), logprobs=(None,))
    whole = Completion.join([first, last])
    assert whole.logprobs == (TOLD[1], None)
    assert whole.prompt_logprobs == (None, TOLD[2])
    assert Completion.join([Chunk("r", "b", (3,), (0,), "stop", Usage(2, 1))]).logprobs is None
