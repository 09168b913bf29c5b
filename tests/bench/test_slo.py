"""Objectives are read in milliseconds, and a request is good if it meets each of them."""

from __future__ import annotations

import pytest

from bench.record import Observed, RequestRecord
from bench.slo import Slo
from bench.stats import run_stats

REQUEST = RequestRecord(4, 10.0, [(10.5, 1), (10.6, 1), (10.7, 1), (11.0, 1)])  # TTFT 0.5, ITL 0.1 0.1 0.3, e2e 1.0


def test_objectives_are_read_in_both_notations():
    ours = Slo.parse(["ttft:500,itl:100,tpot:50.5,e2e:2000"])
    assert ours == Slo(ttft_s=0.5, itl_p99_s=0.1, tpot_s=0.0505, e2e_s=2.0)
    assert Slo.parse(["ttft:500", "itl:100", "tpot:50.5", "e2el:2000"]) == ours  # vLLM's


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tftt:5", "'tftt'"),
        ("ttft", "''"),
        ("itl:fast", "'fast'"),
        ("ttft:0", "greater than 0"),
        ("ttft:nan", "greater than 0"),
        ("e2e:5,e2el:6", "already"),
        ("ttft:5,", "unknown key ''"),
    ],
)
def test_what_is_no_objective_is_refused_by_name(text: str, named: str):
    with pytest.raises(ValueError, match=named):
        Slo.parse([text])


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft:500.001", True),
        ("ttft:499", False),
        ("itl:300", True),  # the p99 of its three intervals is 0.296
        ("itl:290", False),
        ("tpot:167", True),  # their mean 0.1667
        ("tpot:166", False),
        ("e2e:1000.1", True),
        ("e2e:999", False),
        ("ttft:600,e2e:999", False),
    ],
)
def test_each_limit_is_held_against_its_time(text: str, met: bool):
    assert Slo.parse([text]).met_by(REQUEST) is met


def test_one_token_has_no_interval_to_miss_and_a_failed_request_is_never_good():
    assert Slo.parse(["itl:1,tpot:1"]).met_by(RequestRecord(1, 0.0, [(9.0, 1)]))
    assert not Slo.parse(["ttft:9999"]).met_by(RequestRecord(2, 0.0, [(0.1, 1)]))
    assert not Slo.parse(["ttft:9999"]).met_by(RequestRecord(2, 0.0, [], "refused"))


def test_goodput_is_of_all_requests():
    slow = RequestRecord(1, 10.0, [(12.0, 1)])
    failed = RequestRecord(1, 10.0, [], "refused")
    observed = Observed([REQUEST, slow, failed, failed])
    stats = run_stats(observed, Slo(ttft_s=1.0))
    assert (stats.goodput_requests_per_s, stats.goodput_share) == (0.5, 0.25)
    assert (run_stats(observed).goodput_requests_per_s, run_stats(observed).goodput_share) == (None, None)
