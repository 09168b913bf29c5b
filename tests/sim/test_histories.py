"""5,000 random histories of whole clusters. A failure names its seed; `python -m tests.sim SEED` replays it."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from tests.sim.census import run_shard

HISTORIES = 5000
SHARD = 250

Shard = tuple[Counter[str], list[str]]


@pytest.fixture(scope="module")
def shards() -> Iterator[dict[int, Future[Shard]]]:
    """All histories, spread over the cores, by the first seed of each shard."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=context) as pool:
        yield {first: pool.submit(run_shard, first, SHARD) for first in range(0, HISTORIES, SHARD)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("first", range(0, HISTORIES, SHARD))
def test_every_stream_is_golden_whatever_happens(shards: dict[int, Future[Shard]], first: int) -> None:
    _, failures = shards[first].result()
    assert not failures, f"{len(failures)} of {SHARD} histories failed, the first:\n{failures[0]}"


@pytest.mark.parametrize(
    "event",
    [
        "preemptions",
        "recoveries",
        "prefix hits",
        "messages fenced",
        "workers that refused a plan",
        "clients that left",
        "streams moved",
        "requests rejected",
        "finished: stop",
        "finished: length",
        "finished: abort",
        "finished: kv_capacity",
        "finished: error",
    ],
)
def test_the_histories_visit(shards: dict[int, Future[Shard]], event: str) -> None:
    census = sum((shard.result()[0] for shard in shards.values()), Counter())
    assert census[event] >= 100, census
