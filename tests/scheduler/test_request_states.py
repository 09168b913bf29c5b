"""The table of a request's states: legal moves happen, illegal ones raise and change nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from protocol.messages import SamplingParams
from scheduler.request import IllegalTransition, Request, RequestState

S = RequestState
LEGAL = {
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.FINISHED),
    (S.RUNNING, S.WAITING),
    (S.RUNNING, S.DRAINING),
    (S.RUNNING, S.FINISHED),
    (S.DRAINING, S.WAITING),
    (S.DRAINING, S.FINISHED),
}


def request(**sampling: Any) -> Request:
    prompt = np.array([5, 6, 7], dtype=np.int32)
    params = SamplingParams(**sampling)
    return Request(
        "r", prompt, params, limit=3 + params.max_tokens, stop_ids=params.stop_token_ids, root=b"", arrival=0
    )


@pytest.mark.parametrize(("old", "new"), sorted(itertools.product(S, S), key=str))
def test_only_the_legal_moves_are_made(old: RequestState, new: RequestState) -> None:
    moved = request()
    moved.state = old
    if (old, new) in LEGAL:
        moved.move(new)
        assert moved.state is new
    else:
        with pytest.raises(IllegalTransition, match=f"r: {old.value} → {new.value}"):
            moved.move(new)
        assert moved.state is old


def test_it_ends_by_stop_token_before_length() -> None:
    ended = request(max_tokens=4, stop_token_ids=(9,))
    assert ended.ends_with(8, 6) is None
    assert ended.ends_with(9, 6) == "stop"
    assert ended.ends_with(8, 7) == "length"
    assert ended.ends_with(9, 7) == "stop"


def test_no_stop_token_counts_before_min_tokens() -> None:
    ended = request(max_tokens=4, min_tokens=3, stop_token_ids=(9,))
    assert ended.ends_with(9, 5) is None
    assert ended.ends_with(9, 6) == "stop"


def test_a_late_token_becomes_output() -> None:
    late = request()
    late.append_late(11)
    assert late.tokens.tolist() == [5, 6, 7, 11] and late.num_output == 1
    assert late.usage.prompt_tokens == 3 and late.usage.completion_tokens == 1
