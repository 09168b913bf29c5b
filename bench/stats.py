"""From arrival times to the numbers of a run. Pure: no sockets, no clock. All times are seconds.

Definitions, for one request sent at time 0 whose chunks arrive at t_1 < t_2 < … with k_1, k_2, … tokens (in an open
loop, time 0 is when the request was due, however late it was sent):
  TTFT     t_1, the time to the first token.
  ITL      one interval for each token after the first. The k_i tokens of a later chunk share the wait for it evenly:
           k_i intervals of (t_i - t_(i-1)) / k_i. Further tokens of the first chunk came with it: k_1 - 1 intervals
           of 0. So the intervals of a request always add up to (time of the last token) - TTFT, merged or not.
  stall    the longest wait between two chunks: what merging does cost the reader.
  e2e      the time to the last token.
Percentiles are over all completed requests of the run (TTFT, e2e) or all their intervals (ITL).
A request is completed if it brought exactly the tokens it was asked for; every other one is failed, and counts
nowhere but in `failed`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bench.background import background_metrics
from bench.quantiles import percentile
from bench.record import Observed
from bench.slo import Slo


@dataclass(frozen=True)
class RunStats:
    """One target, one round. The field names are the keys of `--json`, and stay."""

    duration_s: float  # from the first request sent to the last token of all
    completed: int  # requests
    failed: int  # requests
    output_tokens: int  # of completed requests
    output_tokens_per_s: float  # output_tokens / duration_s
    requests_per_s: float  # completed / duration_s
    ttft_p50_s: float | None  # None, here and below: no request completed
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    itl_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p90_s: float | None
    e2e_p99_s: float | None
    stall_p50_s: float | None
    stall_p99_s: float | None
    stall_max_s: float | None
    errors: dict[str, int]  # reason -> number of failed requests
    # of requests that meet all service level objectives (bench/slo.py); None where there are none
    goodput_requests_per_s: float | None = None
    goodput_share: float | None = None  # of all requests, failed ones included
    # of conversations; None in other kinds of load
    ttft_first_turn_p50_s: float | None = None
    ttft_later_turns_p50_s: float | None = None
    # of the streams beside long prompts (bench/background.py); None in other kinds of load
    background_itl_p50_s: float | None = None
    background_itl_p99_s: float | None = None
    background_itl_max_s: float | None = None
    background_itl_max_over_p50: float | None = None
    background_quiet_itl_p50_s: float | None = None
    background_tokens_per_s: float | None = None


METRICS = tuple(
    name
    for name in RunStats.__dataclass_fields__
    if name not in ("completed", "failed", "output_tokens", "errors", "duration_s")
)
HIGHER_IS_BETTER = frozenset(
    {
        "output_tokens_per_s",
        "requests_per_s",
        "goodput_requests_per_s",
        "goodput_share",
        "background_tokens_per_s",
    }
)


def run_stats(observed: Observed, slo: Slo | None = None) -> RunStats:
    """The numbers of one run. Raises ValueError if it measured no request."""
    records = observed.records
    if not records:
        raise ValueError("a run without requests has no statistics")
    done = [record for record in records if record.failure is None]
    failures = [record.failure for record in (*records, *observed.background) if record.failure is not None]
    start = min(record.start_s for record in records)
    end = max((time for record in records for time, _ in record.arrivals[-1:]), default=start)
    duration = end - start
    tokens = sum(record.num_tokens for record in done)
    ttft = [record.ttft_s for record in done]
    itl = [interval for record in done for interval in record.itl_s()]
    e2e = [record.e2e_s for record in done]
    stall = [record.stall_s for record in done]
    later_turns = [record.ttft_s for record in done if record.turn > 0]
    good = sum(map(slo.met_by, records)) if slo is not None else None
    return RunStats(
        duration_s=duration,
        completed=len(done),
        failed=len(failures),
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration if duration > 0 else 0.0,
        requests_per_s=len(done) / duration if duration > 0 else 0.0,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=percentile(itl, 50),
        itl_p90_s=percentile(itl, 90),
        itl_p99_s=percentile(itl, 99),
        e2e_p50_s=percentile(e2e, 50),
        e2e_p90_s=percentile(e2e, 90),
        e2e_p99_s=percentile(e2e, 99),
        stall_p50_s=percentile(stall, 50),
        stall_p99_s=percentile(stall, 99),
        stall_max_s=max(stall, default=None),
        errors=dict(Counter(failures)),
        goodput_requests_per_s=None if good is None else good / duration if duration > 0 else 0.0,
        goodput_share=None if good is None else good / len(records),
        ttft_first_turn_p50_s=percentile([r.ttft_s for r in done if r.turn == 0], 50) if later_turns else None,
        ttft_later_turns_p50_s=percentile(later_turns, 50),
        **background_metrics(observed.background, done),
    )
