"""Too little memory: who waits, who is preempted, who can never be served, and that nobody is harmed by it."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.messages import SamplingParams
from scheduler.queue import MAX_OVERTAKEN, RequestQueue
from scheduler.request import Request
from tests.scheduler.deployment import Deployment, greedy


def test_preempted_requests_resume_on_their_own_blocks_and_lose_nothing() -> None:
    """Sixty-four requests that share a prefix, in a pool for about three of them."""
    deployment = Deployment(num_blocks=1 + 26, max_num_seqs=16, max_num_batched_tokens=32)
    names = [f"r{number}" for number in range(64)]
    for number, name in enumerate(names):
        deployment.submit(name, [*range(12), 500 + number], greedy(20))
    deployment.run()
    assert deployment.engine.replicas[0].stats.preemptions >= 10
    for name in names:
        assert deployment.tokens[name] == deployment.golden(name)
        assert deployment.finished[name].usage.completion_tokens == 20
    deployment.check_idle()


def test_seeded_sampling_is_the_same_after_a_preemption() -> None:
    deployment = Deployment(num_blocks=1 + 8)
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    for name in ("a", "b", "c"):
        deployment.submit(name, [1, 2, 3], sampling)
    deployment.run()
    assert deployment.engine.replicas[0].stats.preemptions > 0
    assert deployment.tokens["a"] == deployment.tokens["b"] == deployment.tokens["c"] == deployment.golden("a")


def test_the_latest_is_the_victim_and_the_oldest_always_progresses() -> None:
    deployment = Deployment(num_blocks=1 + 8, enable_prefix_caching=False)
    deployment.submit("old", [1, 2, 3, 4], greedy(20))
    deployment.submit("young", [5, 6, 7, 8], greedy(20))
    order: list[str] = []
    while not order or len(order) < 2:
        deployment.step()
        order += [name for name in deployment.finished if name not in order]
    assert order == ["old", "young"]
    assert deployment.engine.replicas[0].stats.preemptions > 0


def test_a_higher_priority_is_not_the_victim_of_an_older_one() -> None:
    deployment = Deployment(num_blocks=1 + 8, enable_prefix_caching=False)
    deployment.submit("old", [1, 2, 3, 4], greedy(20))
    deployment.submit("urgent", [5, 6, 7, 8], greedy(20), priority=-1)
    while "urgent" not in deployment.finished:
        assert "old" not in deployment.finished
        deployment.step()
    deployment.run()
    assert deployment.tokens["old"] == deployment.golden("old")


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_blocks_nobody() -> None:
    """Eight blocks of 16, one of them the null block: 112 tokens fit, 113 do not."""
    deployment = Deployment(block_size=16, num_blocks=8)
    deployment.submit("long", list(range(113)))
    assert deployment.rejected["long"].code == "too_long"
    assert "7 blocks of 16 tokens" in deployment.rejected["long"].message
    deployment.submit("short", [1, 2, 3])
    deployment.run()
    assert deployment.tokens["short"] == deployment.golden("short")
    deployment.submit("longest", list(range(112)), greedy(1))
    deployment.run()
    assert deployment.tokens["longest"] == deployment.golden("longest")
    deployment.check_idle()


def test_a_request_that_outgrows_the_pool_alone_ends_with_the_reason() -> None:
    """100 + 50 tokens against 112 slots: all 112 and the one behind them are delivered, then it ends."""
    deployment = Deployment(block_size=16, num_blocks=8)
    deployment.submit("grows", list(range(100)), greedy(50))
    steps = deployment.run(most_steps=40)
    assert deployment.finished["grows"].reason == "kv_capacity"
    assert deployment.tokens["grows"] == deployment.golden("grows")[:13]
    assert steps <= 13 + 3
    deployment.check_idle()


def test_two_that_outgrow_the_pool_together_end_one_after_the_other() -> None:
    deployment = Deployment(block_size=4, num_blocks=1 + 5)
    for name in ("a", "b"):
        deployment.submit(name, [1, 2, 3, int(name == "a")], greedy(40))
    deployment.run(most_steps=200)
    for name in ("a", "b"):
        assert deployment.finished[name].reason == "kv_capacity"
        assert deployment.tokens[name] == deployment.golden(name)[: 21 - 4]
    deployment.check_idle()


def test_what_fits_a_window_is_admitted_in_chunks_that_fit() -> None:
    """16 tokens: 4 blocks in the full group and 2 in the window group fit into 6; a chunk of 16 in both does not."""
    deployment = Deployment(windows=(0, 4), num_blocks=1 + 6)
    deployment.submit("r", list(range(16)), greedy(1))
    deployment.run(most_steps=20)
    assert deployment.tokens["r"] == deployment.golden("r")
    deployment.check_idle()


def test_a_long_prompt_in_a_window_model_needs_just_the_window() -> None:
    deployment = Deployment(windows=(4,), num_blocks=1 + 3, max_num_batched_tokens=8)
    deployment.submit("r", list(range(100)), greedy(30))
    deployment.run(most_steps=300)
    assert deployment.tokens["r"] == deployment.golden("r")
    assert deployment.finished["r"].reason == "length"
    deployment.check_idle()


# ---------------------------------------------------------------------------------------------- pools that differ


def test_a_request_moves_to_the_replica_whose_pool_can_hold_it() -> None:
    deployment = Deployment(replicas=2, num_blocks=[1 + 4, 1 + 8])
    deployment.submit("r", [1, 2, 3, 4], greedy(24))  # starts on replica 0
    deployment.run()
    assert deployment.finished["r"].reason == "length"
    assert deployment.tokens["r"] == deployment.golden("r")
    deployment.check_idle()


def test_a_request_waits_for_the_dead_worker_whose_pool_can_hold_it() -> None:
    deployment = Deployment(replicas=2, num_blocks=[1 + 2, 1 + 8])
    deployment.submit("large", list(range(20)))
    deployment.step(replica=1)
    deployment.kill(1)
    deployment.submit("small", [1, 2, 3], greedy(4))
    deployment.run()
    assert deployment.tokens["small"] == deployment.golden("small"), "nobody waits behind what waits for a worker"
    assert "large" not in deployment.finished
    deployment.start(1)
    deployment.run()
    assert deployment.tokens["large"] == deployment.golden("large")
    assert deployment.finished["large"].reason == "length"
    deployment.check_idle()


def test_what_was_accepted_waits_for_workers_that_are_yet_to_come() -> None:
    deployment = Deployment(replicas=2, num_blocks=[1 + 2, 1 + 8], start=False)
    deployment.submit("large", list(range(20)))
    deployment.start(0)
    assert "large" not in deployment.finished
    deployment.start(1)
    deployment.run()
    assert deployment.tokens["large"] == deployment.golden("large")


def test_what_was_accepted_and_fits_no_worker_that_came_ends_with_the_reason() -> None:
    deployment = Deployment(num_blocks=1 + 2, start=False)
    deployment.submit("large", list(range(20)))
    deployment.submit("small", [1, 2, 3], greedy(4))
    deployment.start()
    assert deployment.finished["large"].reason == "kv_capacity"
    deployment.run()
    assert deployment.tokens["small"] == deployment.golden("small")
    deployment.check_idle()


# -------------------------------------------------------------------------------------------------------- the queue


def _waiting(arrival: int, priority: int = 0) -> Request:
    prompt = np.array([1], dtype=np.int32)
    return Request(
        f"r{arrival}", prompt, SamplingParams(), limit=9, stop_ids=(), root=b"", arrival=arrival, priority=priority
    )


def test_the_queue_is_sorted_by_priority_then_arrival_whoever_returns() -> None:
    queue = RequestQueue()
    requests = [_waiting(0), _waiting(1, priority=-1), _waiting(2), _waiting(3, priority=1)]
    for request in reversed(requests):
        queue.push(request)
    assert [request.arrival for request in queue] == [1, 0, 2, 3]
    queue.remove(requests[0])
    with pytest.raises(KeyError):
        queue.remove(requests[0])
    queue.push(requests[0])
    assert [request.arrival for request in queue] == [1, 0, 2, 3]


def test_a_blocked_head_is_overtaken_a_bounded_number_of_times() -> None:
    deployment = Deployment(num_blocks=1 + 10, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    deployment.submit("holder", [1, 2, 3], greedy(20))
    deployment.submit("blocked", list(range(37)), greedy(1))  # all ten blocks
    count = MAX_OVERTAKEN + 20
    for number in range(count):
        deployment.submit(f"short{number}", [number], greedy(1))
        if number % 4 == 0:
            deployment.submit(f"holder{number}", [3, 2, 1], greedy(20))
    deployment.run()
    finished = list(deployment.finished)
    before = finished.index("blocked")
    assert 0 < before <= MAX_OVERTAKEN + 2
    assert deployment.tokens["blocked"] == deployment.golden("blocked")
    deployment.check_idle()
