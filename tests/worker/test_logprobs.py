"""Log-probabilities against float64, and which prompt tokens a step reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protocol.logprobs import Logprobs
from worker.logprobs import logprobs_of


@pytest.mark.parametrize("vocab", [1, 7, 300, 4100])
def test_values_ranks_and_the_top_are_those_of_float64(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    tokens = torch.tensor([0, vocab - 1, int(logits[2].argmax()), -1, vocab // 2])
    counts = np.array([1, 4, 21, 6, 0])
    found = Logprobs(logprobs_of(logits, tokens, counts))
    wide = logits.double().numpy()
    logprobs = (
        wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    )
    for row, count in enumerate(counts.tolist()):
        told = found.at(row)
        if row in (3, 4):
            assert told is None, "the row failed, or nobody asked"
            continue
        assert told is not None
        token = int(tokens[row])
        order = np.argsort(-logprobs[row], kind="stable")
        assert told.token_id == token
        assert told.logprob == pytest.approx(logprobs[row, token], abs=2e-6)
        assert told.rank == 1 + int((order == token).argmax())
        assert [candidate for candidate, _ in told.top] == order[: count - 1].tolist()
        np.testing.assert_allclose([value for _, value in told.top], logprobs[row, order[: count - 1]], atol=2e-6)


def test_equal_logits_share_the_best_rank() -> None:
    told = Logprobs(logprobs_of(torch.zeros(1, 8), torch.tensor([5]), np.array([1]))).at(0)
    assert told is not None and (told.rank, told.top) == (1, ())
    assert told.logprob == pytest.approx(-np.log(8))
