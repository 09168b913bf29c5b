"""Which replica a request goes to: where its prefix lies, unless that one has much more to do."""

from __future__ import annotations

import pytest

from scheduler.cache_manager import PrefixHit
from scheduler.request import Request
from scheduler.router import load
from tests.scheduler.deployment import Deployment, greedy


def replica_of(deployment: Deployment, name: str) -> int | None:
    return deployment.engine.requests[name].replica


def admitted_tokens(deployment: Deployment) -> list[int]:
    """Per replica: prompt tokens of the requests that were first admitted there."""
    return [replica.stats.prefix_queries for replica in deployment.engine.replicas]


def warm(deployment: Deployment, prompt: list[int], replica: int) -> None:
    """Leave the prompt's blocks in the cache of one replica."""
    other = 1 - replica
    deployment.kill(other)
    deployment.submit("warm", prompt, greedy(1))
    deployment.run()
    deployment.start(other)


def test_idle_replicas_share_the_load() -> None:
    deployment = Deployment(replicas=2)
    for number in range(8):
        deployment.submit(f"r{number}", [number, 1, 2])
    deployment.run()
    assert admitted_tokens(deployment) == [12, 12]
    deployment.check_idle()


def test_a_long_prompt_goes_where_fewest_streams_decode() -> None:
    for fewest in (0, 1):
        deployment = Deployment(replicas=2, num_blocks=400)
        for number in range(8):
            deployment.submit(f"r{number}", [number, 1, 2], greedy(150))
        for name, request in list(deployment.engine.requests.items()):
            if request.replica == fewest and name not in ("r0", "r1"):
                deployment.abort(name)
        for _ in range(3):
            deployment.step(0)
            deployment.step(1)
        deployment.submit("long", [number % 100 for number in range(60)], greedy(2))
        deployment.step(fewest)
        assert replica_of(deployment, "long") == fewest


def test_a_request_goes_where_its_prefix_lies() -> None:
    for replica in (0, 1):
        deployment = Deployment(replicas=2)
        warm(deployment, list(range(40)), replica)
        deployment.submit("r", [*range(40), 99])
        assert replica_of(deployment, "r") == replica
        deployment.run()
        assert deployment.cached("r") == 40


def test_a_short_prefix_does_not_outweigh_a_long_queue() -> None:
    deployment = Deployment(replicas=2, num_blocks=256)
    warm(deployment, list(range(8)), replica=0)
    deployment.submit("first", [*range(8), 1], greedy(50))
    deployment.submit("second", [*range(8), 2], greedy(50))
    assert (replica_of(deployment, "first"), replica_of(deployment, "second")) == (0, 1)
    deployment.run()
    assert (deployment.cached("first"), deployment.cached("second")) == (8, 0)
    deployment.check_idle()


def test_a_dead_replica_gets_nothing() -> None:
    deployment = Deployment(replicas=3)
    deployment.kill(1)
    for number in range(6):
        deployment.submit(f"r{number}", [number, 1, 2])
    deployment.run()
    assert admitted_tokens(deployment) == [9, 0, 9]
    deployment.check_idle()


def test_without_a_living_replica_requests_wait() -> None:
    deployment = Deployment(replicas=2)
    for replica in (0, 1):
        deployment.kill(replica)
    deployment.submit("r", [1, 2, 3])
    assert replica_of(deployment, "r") is None and "r" not in deployment.rejected
    deployment.start(1)
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_request_does_not_wait_for_the_better_replica_when_that_one_has_no_room() -> None:
    deployment = Deployment(replicas=2, max_num_seqs=1, max_num_batched_tokens=64)
    warm(deployment, list(range(40)), replica=0)
    deployment.submit("first", [*range(40), 1], greedy(20))
    deployment.submit("second", [*range(40), 2], greedy(2))
    assert (replica_of(deployment, "first"), replica_of(deployment, "second")) == (0, 1)
    deployment.run()
    deployment.check_idle()


def test_load_is_nothing_when_idle() -> None:
    deployment = Deployment(replicas=2)
    for number in range(20):
        deployment.submit(f"r{number}", [number, 1, 2], greedy(1 + number))
        if number % 3 == 0:
            deployment.abort(f"r{number}")
    deployment.step(0)
    deployment.kill(0)
    deployment.start(0)
    deployment.run()
    assert [load(replica) for replica in deployment.engine.replicas] == [0, 0]
    deployment.check_idle()


def test_while_no_block_is_free_nobody_who_waits_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(num_blocks=16)
    deployment.submit("first", list(range(58)), greedy(3))
    manager, looked = deployment.engine.replicas[0].manager, list[str]()
    assert manager.pool.num_free == 0
    find = manager.get_computed_blocks

    def look(request: Request) -> PrefixHit:
        looked.append(request.request_id)
        return find(request)

    monkeypatch.setattr(manager, "get_computed_blocks", look)
    waiting = [f"r{number}" for number in range(5)]
    for name in waiting:
        deployment.submit(name, [1, 2, 3])
    deployment.step(0)
    assert "first" not in deployment.finished and not looked
    deployment.run()
    assert looked == waiting
    deployment.check_idle()
