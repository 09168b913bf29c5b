"""Biases, early stop tokens and penalties against the formulas in float64; rows that come, go and come again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.arrays import pack
from protocol.messages import NewRequestData, SamplingParams, SchedulerOutput
from tests.worker.formulas import expected
from worker.logit_rules import LogitRules

VOCAB = 50


def plan(admit: tuple[NewRequestData, ...] = (), finish: tuple[int, ...] = ()) -> SchedulerOutput:
    empty = b""
    return SchedulerOutput(0, 0, pack(finish), admit, empty, empty, (), 0, empty, empty, empty, empty, empty)


def entering(row: int, prompt: list[int], output: list[int], **sampling: Any) -> NewRequestData:
    params = SamplingParams(**sampling)
    return NewRequestData(row, pack(prompt + output), len(prompt), 0, (), params)


def logits_of(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 4).astype(np.float32)


def applied(rules: LogitRules, logits: np.ndarray, rows: list[int], num_tokens: list[int]) -> np.ndarray:
    tensor = torch.from_numpy(logits.copy())
    rules.apply(tensor, np.array(rows), np.array(num_tokens))
    return tensor.numpy()


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PARAMS = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.one_of(
            st.none(), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5)
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(TOKENS.filter(bool), TOKENS, PARAMS), min_size=1, max_size=4),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.integers(0, 99),
)
def test_every_row_gets_what_the_formula_says(
    requests: list[tuple[list[int], list[int], dict[str, Any]]], drawn: list[int], seed: int
) -> None:
    """A request that comes with output already (preempted, recovered) is like one that drew it here."""
    rules = LogitRules()
    rules.follow(plan(tuple(entering(row, p, o, **s) for row, (p, o, s) in enumerate(requests))))
    rows = list(range(len(requests)))
    for token in drawn:
        rules.note(np.array(rows), np.full(len(rows), token, dtype=np.int32))
    logits = logits_of(len(rows), seed)
    found = applied(rules, logits, rows, [len(p) + len(o) + len(drawn) for p, o, _ in requests])
    for row, (prompt, output, sampling) in enumerate(requests):
        right = expected(logits[row], prompt, output + drawn, SamplingParams(**sampling))
        np.testing.assert_allclose(found[row], right, rtol=1e-5, atol=1e-5)


def test_a_row_without_rules_is_left_bit_for_bit() -> None:
    rules = LogitRules()
    rules.follow(plan((entering(0, [1, 2], [3]), entering(1, [1], [2], presence_penalty=1.0))))
    logits = logits_of(2)
    assert (applied(rules, logits, [0, 1], [3, 2])[0] == logits[0]).all()
    assert not rules.concern(np.array([0]))
    assert rules.concern(np.array([0, 1]))


def test_a_row_that_is_given_away_forgets() -> None:
    rules = LogitRules()
    rules.follow(plan((entering(0, [1], [2], presence_penalty=1.0, logit_bias={4: 1.0}, min_tokens=9),)))
    rules.follow(plan((entering(0, [1], [2], frequency_penalty=1.0),), finish=(0,)))
    logits = logits_of(1)
    right = expected(logits[0], [1], [2], SamplingParams(frequency_penalty=1.0))
    np.testing.assert_allclose(applied(rules, logits, [0], [2])[0], right, rtol=1e-6)
    rules.follow(plan(finish=(0,)))
    assert not rules.concern(np.array([0]))


def test_a_new_epoch_forgets_all_rows() -> None:
    rules = LogitRules()
    rules.follow(plan((entering(3, [1], [2], presence_penalty=1.0),)))
    rules.start_epoch()
    assert not rules.concern(np.arange(8))


@pytest.mark.parametrize(("known", "open_"), [(5, False), (6, False), (7, True), (8, True)])
def test_stop_tokens_are_kept_back_for_exactly_min_tokens(known: int, open_: bool) -> None:
    rules = LogitRules()
    rules.follow(plan((entering(2, [1, 1, 1, 1], [], min_tokens=3, stop_token_ids=(7, 9, 7)),)))
    found = applied(rules, logits_of(1), [2], [known])
    assert (np.isfinite(found[0, [7, 9]]) == open_).all()
    assert np.isfinite(np.delete(found[0], [7, 9])).all()


def test_a_failed_token_is_not_counted() -> None:
    rules = LogitRules()
    rules.follow(plan((entering(0, [1], [], presence_penalty=1.0),)))
    rules.note(np.array([0]), np.array([-1], dtype=np.int32))
    logits = logits_of(1)
    assert (applied(rules, logits, [0], [1]) == logits).all()
