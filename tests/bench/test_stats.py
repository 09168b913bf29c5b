"""The numbers of a run follow their definitions, on arrival times that a hand can check."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.compare import compare, summarise
from bench.quantiles import median, percentile
from bench.record import Observed, RequestRecord
from bench.stats import HIGHER_IS_BETTER, METRICS, run_stats


def record(start: float, *arrivals: tuple[float, int], output_len: int | None = None, error: str | None = None):
    asked = sum(count for _, count in arrivals) if output_len is None else output_len
    return RequestRecord(asked, start, list(arrivals), error)


def test_percentile_interpolates_between_ranks():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([10.0, 20.0], 90) == pytest.approx(19.0)
    assert percentile([7.0], 99) == 7.0
    assert (percentile([3.0, 1.0, 2.0], 0), percentile([3.0, 1.0, 2.0], 100)) == (1.0, 3.0)


def test_percentile_equals_numpys():
    rng = random.Random(5)
    for size in (1, 2, 3, 10, 101):
        values = [rng.uniform(-5, 5) for _ in range(size)]
        for q in (0, 1, 25, 50, 90, 99, 99.9, 100):
            assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)))


def test_percentile_of_nothing_is_absent_and_of_a_bad_rank_an_error():
    assert percentile([], 50) is None
    assert median([None, None]) is None
    assert median([None, 3.0, 1.0]) == 2.0
    for q in (-1, 100.5):
        with pytest.raises(ValueError, match="percentile"):
            percentile([1.0], q)


def test_times_of_one_request_are_counted_from_its_start():
    one = record(10.0, (12.0, 1), (12.5, 1), (13.5, 1))
    assert (one.ttft_s, one.e2e_s, one.stall_s) == (2.0, 3.5, 1.0)
    assert one.itl_s() == [0.5, 1.0]


def test_merged_tokens_share_the_wait_for_their_chunk_evenly():
    merged = record(0.0, (1.0, 1), (4.0, 3))
    assert merged.itl_s() == [1.0, 1.0, 1.0]
    assert merged.stall_s == 3.0  # which the intervals hide


def test_further_tokens_of_the_first_chunk_have_no_interval():
    assert record(0.0, (1.0, 3), (2.0, 1)).itl_s() == [0.0, 0.0, 1.0]


def test_intervals_add_up_to_the_time_after_the_first_token_however_they_were_merged():
    rng = random.Random(1)
    for _ in range(200):
        now, arrivals = 3.0, []
        for _ in range(rng.randint(1, 20)):
            now += rng.expovariate(10)
            arrivals.append((now, rng.randint(1, 4)))
        one = record(3.0, *arrivals)
        assert len(one.itl_s()) == one.num_tokens - 1
        assert sum(one.itl_s()) == pytest.approx(one.e2e_s - one.ttft_s)


def test_throughput_counts_from_the_first_send_to_the_last_token():
    stats = run_stats(Observed([record(1.0, (2.0, 1), (3.0, 1)), record(1.5, (4.0, 1), (5.0, 3))]))
    assert stats.duration_s == 4.0
    assert (stats.completed, stats.failed, stats.output_tokens) == (2, 0, 6)
    assert (stats.output_tokens_per_s, stats.requests_per_s) == (1.5, 0.5)
    assert stats.ttft_p50_s == pytest.approx(1.75)
    assert stats.itl_p99_s == pytest.approx(1.0 - 0.03 * (1.0 - 1 / 3))  # 1, and three intervals of a third
    assert stats.errors == {}


def test_a_failed_request_counts_nowhere_but_as_failed():
    good = record(0.0, (1.0, 1), (2.0, 1))
    short = record(0.0, (0.1, 1), output_len=2)
    broken = record(0.0, (0.1, 2), error="HTTP 500")
    silent = record(0.0, output_len=2)
    stats = run_stats(Observed([good, short, broken, silent]))
    assert (stats.completed, stats.failed, stats.output_tokens) == (1, 3, 2)
    assert (stats.ttft_p50_s, stats.e2e_p99_s, stats.duration_s) == (1.0, 2.0, 2.0)
    assert stats.errors == {
        "1 tokens came, 2 were asked for": 1,
        "HTTP 500": 1,
        "0 tokens came, 2 were asked for": 1,
    }


def test_a_run_in_which_all_failed_has_no_latency_and_no_throughput():
    stats = run_stats(Observed([record(0.0, output_len=1, error="refused")]))
    assert (stats.output_tokens_per_s, stats.ttft_p50_s, stats.stall_max_s) == (0.0, None, None)
    with pytest.raises(ValueError, match="without requests"):
        run_stats(Observed([]))


def runs(*tokens_in_a_second: int):
    return [run_stats(Observed([record(0.0, (0.5, 1), (1.0, count - 1))])) for count in tokens_in_a_second]


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_of_the_rounds():
    comparison = compare("a", "b", {"a": runs(20, 30, 60), "b": runs(10, 10, 40)})
    ratio = comparison.metrics["output_tokens_per_s"]
    assert (comparison.subject, comparison.baseline) == ("a", "b")
    assert (ratio.ratio, ratio.min, ratio.max) == (3.0, 1.5, 3.0)
    assert ratio.rounds == [2.0, 3.0, 1.5]


def test_a_ratio_to_nothing_is_absent():
    dead = [run_stats(Observed([record(0.0, output_len=1, error="refused")]))]
    metrics = compare("a", "b", {"a": runs(20), "b": dead}).metrics
    assert all(ratio.ratio is None and ratio.rounds == [] for ratio in metrics.values())


def test_summary_has_every_metric_with_its_extremes():
    summary = summarise(runs(30, 10, 20))
    assert tuple(summary) == METRICS
    assert (summary["output_tokens_per_s"].min, summary["output_tokens_per_s"].max) == (10.0, 30.0)
    assert summary["output_tokens_per_s"].median == 20.0
    assert set(METRICS) > HIGHER_IS_BETTER
