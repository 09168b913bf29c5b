"""How much of a GPU's memory is a worker's, by arithmetic."""

from __future__ import annotations

import pytest

from worker.kv_cache import gpu_budget

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "own", "sharers", "expected"),
    [
        (64, 16, 1, 0.9 * 80 - 16),  # alone: all but a tenth, less what its weights take
        (80, 0, 2, 0.9 * 40),  # the first of two must leave the other's half alone
        (20, 16, 2, 0.9 * 20),  # something else lies there: not more than is free
        (4, 75, 1, 0.0),  # weights that take all of it leave nothing
    ],
)
def test_a_worker_takes_its_share_of_a_gpu(free: int, own: int, sharers: int, expected: float) -> None:
    assert gpu_budget(free * GIB, 80 * GIB, own * GIB, sharers) == pytest.approx(expected * GIB, abs=2)
