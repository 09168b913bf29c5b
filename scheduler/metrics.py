"""What one replica has done since the scheduler started, as counters and histograms. They survive its epochs.

Every number is kept where the thing happens; nothing is computed for those who ask but a copy. Per step it costs one
histogram update for all tokens together and one for each stage. Pure: moments are given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.histograms import BOUNDS, STAGE_S, STAGES
from protocol.messages import FinishReason, ReplicaMetrics
from scheduler.batch import RowBatch
from scheduler.histogram import Histogram
from scheduler.request import Request
from scheduler.step_log import StepRecord

I64 = NDArray[np.int64]


class ReplicaStats:
    """Counters and histograms of one replica."""

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.steps = 0
        self.prompt_tokens = 0
        """Of requests that have come to their first token."""
        self.generated_tokens = 0
        self.preemptions = 0
        self.recoveries = 0
        self.fenced_messages = 0
        self.rested_s = 0.0
        """Waited between steps for the sake of another replica's prompt."""
        self.work_items = 0
        self.borrowed_items = 0
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self.stages = {stage: Histogram(STAGE_S) for stage in STAGES}

    def admitted(self, request: Request, now: float) -> None:
        """A request got a row. Only the first time counts: later ones are the price of preemption or recovery."""
        if request.admitted_at is None:
            request.admitted_at = now
            self.histograms["request_queue_time_seconds"].observe(now - request.arrived_at)

    def tokens(self, rows: RowBatch, row: I64, index: I64, now: float) -> None:
        """One more token of each `row` counts; index: its place in the sequence. Call before `rows` forgets any."""
        gaps = now - rows.last_token_at[row]
        fresh = np.isnan(gaps)
        if fresh.any():
            gaps = gaps[~fresh]
            for place in np.nonzero(fresh & (index == rows.prompt_len[row]))[0].tolist():
                request = rows.requests[int(row[place])]
                assert request is not None
                self._first_token(request, now)
        self.histograms["inter_token_latency_seconds"].observe_all(gaps)
        rows.last_token_at[row] = now

    def late_token(self, request: Request, now: float) -> None:
        """The same for a request that has no row any more. Call when the token is appended."""
        if not np.isnan(request.last_token_at):
            self.histograms["inter_token_latency_seconds"].observe(now - request.last_token_at)
        elif request.num_output == 1:
            self._first_token(request, now)
        request.last_token_at = now

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_at = now
        self.prompt_tokens += request.prompt_len
        self.histograms["time_to_first_token_seconds"].observe(now - request.arrived_at)
        if request.admitted_at is not None:
            self.histograms["request_prefill_time_seconds"].observe(now - request.admitted_at)

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request that ran here is over. What was aborted or failed says nothing about how long requests take."""
        if reason in ("abort", "error"):
            return
        self.histograms["e2e_request_latency_seconds"].observe(now - request.arrived_at)
        self.histograms["request_prompt_tokens"].observe(request.prompt_len)
        self.histograms["request_generation_tokens"].observe(request.num_output)
        if request.first_token_at is not None:
            self.histograms["request_decode_time_seconds"].observe(now - request.first_token_at)

    def step_done(self, record: StepRecord) -> None:
        """The result of a step counts."""
        self.rested_s += record.rest_s
        self.histograms["iteration_tokens"].observe(record.num_tokens)
        for stage, seconds in record.stages.items():
            self.stages[stage].observe(seconds)

    def computed(self, before: tuple[int, int], now: tuple[int, int]) -> None:
        """A worker tells what it has done since its start: items of work, and how many on borrowed cores."""
        self.work_items += now[0] - before[0]
        self.borrowed_items += now[1] - before[1]

    def data(self, replica: int, pace: tuple[float, float, int]) -> ReplicaMetrics:
        """All that Status does not tell, for the wire. pace: see `Planner.pace`."""
        return ReplicaMetrics(
            replica,
            self.prompt_tokens,
            {name: histogram.data for name, histogram in self.histograms.items()},
            {stage: histogram.data for stage, histogram in self.stages.items()},
            *pace,
            self.rested_s,
            self.work_items,
            self.borrowed_items,
        )
