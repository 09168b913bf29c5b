"""When a dead process is started again."""

from __future__ import annotations

from supervisor.backoff import Backoff


def test_first_death_of_a_stable_process_costs_no_wait() -> None:
    assert Backoff().after_death(60.0) == 0


def test_process_that_never_gets_ready_waits_twice_as_long_each_time_up_to_ten_seconds() -> None:
    backoff = Backoff()
    delays = [backoff.after_death(None) for _ in range(8)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.failed_starts == 8


def test_process_that_serves_for_a_moment_waits_a_second_at_most() -> None:
    backoff = Backoff()
    assert [backoff.after_death(0.5) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.failed_starts == 0


def test_stability_forgives_everything() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after_death(None)
    assert backoff.after_death(3.0) == 0
    assert backoff.failed_starts == 0
    assert backoff.after_death(None) == 0.2


def test_delays_stay_finite_for_ever() -> None:
    backoff = Backoff()
    assert {backoff.after_death(None) for _ in range(5000)} == {0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0}
