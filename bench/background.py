"""What streams in the background felt while long prompts were computed beside them. Pure. All times are seconds.

A long prompt is *being computed* from when it is sent until its first token arrives. An interval between two chunks of
a background stream is *disturbed* if it overlaps such a time, and quiet otherwise; the k tokens of a chunk count as k
intervals of 1/k of the wait, as everywhere (bench/stats.py). The metrics, over the intervals of all streams together:
  background_itl_p50_s, background_itl_p99_s, background_itl_max_s   of the disturbed intervals
  background_itl_max_over_p50                                        their greatest over their median
  background_quiet_itl_p50_s                                         median of the quiet ones
  background_tokens_per_s                                            tokens of all streams, from the first long prompt's
                                                                     sending to the last one's last token
All are None in a load without a background.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bench.quantiles import percentile
from bench.record import RequestRecord


def background_metrics(background: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> dict[str, float | None]:
    """The metrics above, of the background streams beside `done`, the long prompts that were completed."""
    windows = [(record.start_s, record.arrivals[0][0]) for record in done]
    disturbed: list[float] = []
    quiet: list[float] = []
    for record in background:
        for (before, _), (time, count) in itertools.pairwise(record.arrivals):
            hit = any(before < end and time > start for start, end in windows)
            (disturbed if hit else quiet).extend([(time - before) / count] * count)
    middle, greatest = percentile(disturbed, 50), max(disturbed, default=None)
    return {
        "background_itl_p50_s": middle,
        "background_itl_p99_s": percentile(disturbed, 99),
        "background_itl_max_s": greatest,
        "background_itl_max_over_p50": greatest / middle if greatest is not None and middle else None,
        "background_quiet_itl_p50_s": percentile(quiet, 50),
        "background_tokens_per_s": _throughput(background, done) if background else None,
    }


def _throughput(background: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> float | None:
    if not done:
        return None
    start = min(record.start_s for record in done)
    end = max(record.arrivals[-1][0] for record in done)
    tokens = sum(count for record in background for time, count in record.arrivals if start < time <= end)
    return tokens / (end - start) if end > start else None
