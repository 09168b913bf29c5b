"""The order of measurement: a discarded warm-up of each target, then rounds of A B … A B …, one target at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.load import Load
from bench.record import RequestRecord
from bench.results import TargetResult
from bench.slo import Slo
from bench.stats import RunStats, run_stats
from bench.target import Target

WARMUP_ROUND = 0  # measured rounds are 1, 2, …


class Watcher(Protocol):
    """Is told of the progress."""

    def start(self, label: str, num_requests: int) -> None: ...
    def request_done(self, record: RequestRecord) -> None: ...
    def end(self, stats: RunStats) -> None: ...


async def measure(
    targets: Sequence[tuple[Target, TargetResult]],
    load: Load,
    repeat: int,
    watcher: Watcher,
    warmup: bool = True,
    request_timeout_s: float = 600.0,
    budget_s: float | None = None,
    slo: Slo | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Fill each result's `warmup` and `runs`. All targets are open and stay so; an unmeasured one is idle.

    With `budget_s`, no further round starts that would likely end after so many seconds from now, judged by the longest
    round so far; the first round always runs, so every target has one run at least, and all have equally many.
    """
    started = clock()

    async def run(target: Target, round_index: int, label: str) -> RunStats:
        watcher.start(f"{target.name}, {label}", load.workload.num_requests)
        observed = await load.run(target, round_index, watcher.request_done, clock, request_timeout_s)
        stats = run_stats(observed, slo)
        watcher.end(stats)
        return stats

    if warmup:
        for target, result in targets:
            result.warmup = await run(target, WARMUP_ROUND, "warm-up")
    longest = 0.0
    for i in range(1, repeat + 1):
        begin = clock()
        if i > 1 and budget_s is not None and begin - started + longest > budget_s:
            return
        for target, result in targets:
            result.runs.append(await run(target, i, f"round {i} of {repeat}"))
        longest = max(longest, clock() - begin)
