"""Clients that stay, leave, move and read slowly: every token once, to whoever is attached; nothing kept for long."""

from __future__ import annotations

from protocol import messages as m
from protocol.arrays import pack, unpack
from scheduler import events as e
from scheduler.connections import KEPT_FINISHED
from scheduler.outbox import Outbox
from tests.scheduler.deployment import Deployment, greedy


def to(identity: bytes, actions: list[e.Action]) -> list[m.SchedulerToClient]:
    return [action.message for action in actions if isinstance(action, e.ToClient) and action.identity == identity]


def attach(deployment: Deployment, name: str, index: int, identity: bytes = b"new") -> list[m.SchedulerToClient]:
    """Raw answers, before the deployment's own books."""
    return to(identity, deployment.engine.handle(e.FromClient(identity, m.Attach(name, index)), 0.0))


def test_one_batch_a_step_and_connection_carries_all_streams() -> None:
    deployment = Deployment()
    for number in range(6):
        deployment.submit(f"r{number}", [number], client=b"even" if number % 2 == 0 else b"odd")
    for _ in range(3):
        deployment.run_plan()
        worker = deployment.worker()
        result = deployment.results[worker.identity].popleft()
        actions = deployment.handle(e.FromWorker(worker.identity, result))
        for identity in (b"even", b"odd"):
            assert len([msg for msg in to(identity, actions) if isinstance(msg, m.TokenBatch)]) <= 1
    deployment.run()
    for number in range(6):
        assert deployment.tokens[f"r{number}"] == deployment.golden(f"r{number}")


def test_whoever_attaches_gets_the_rest_from_its_index_on() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(10))
    for _ in range(5):
        deployment.step()
    had = list(deployment.tokens["r"])
    accepted, missed = attach(deployment, "r", 2)
    assert isinstance(accepted, m.Accepted) and isinstance(missed, m.TokenBatch)
    assert unpack(missed.indices).tolist() == [2, 3, 4] and unpack(missed.tokens).tolist() == had[2:]
    assert set(unpack(missed.handles).tolist()) == {accepted.handle}
    deployment._names[b"new", accepted.handle] = "r"
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")
    assert not deployment.engine.connections._by_identity


def test_a_finished_request_can_still_be_attached_to() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(4))
    deployment.run()
    accepted, missed, finished = attach(deployment, "r", 0)
    assert isinstance(accepted, m.Accepted) and isinstance(missed, m.TokenBatch) and isinstance(finished, m.Finished)
    assert unpack(missed.tokens).tolist() == deployment.golden("r")
    assert (finished.reason, finished.usage) == ("length", m.Usage(3, 4, 0))
    assert len(attach(deployment, "r", 4)) == 2, "nothing missed"


def test_attaching_to_what_is_unknown_or_to_the_future_is_refused() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3])
    (unknown,) = attach(deployment, "other", 0)
    assert isinstance(unknown, m.Rejected) and unknown.code == "unknown_request"
    for index in (-1, 1):
        (refused,) = attach(deployment, "r", index)
        assert isinstance(refused, m.Rejected) and refused.param == "next_index"
    deployment.run()
    assert deployment.tokens["r"] == deployment.golden("r")


def test_a_bounded_number_of_outcomes_is_kept() -> None:
    deployment = Deployment()
    for number in range(KEPT_FINISHED + 5):
        deployment.submit(f"r{number}", [1], greedy(1))
        deployment.abort(f"r{number}")
    assert len(deployment.engine.connections.finished) == KEPT_FINISHED
    (gone,) = attach(deployment, "r4", 0)
    assert isinstance(gone, m.Rejected)
    assert len(attach(deployment, "r5", 0)) == 2


def test_clients_that_leave_in_any_state_leave_nothing_behind() -> None:
    """Fifty clients gone: waiting, in prefill, decoding, preempted, with tokens in flight."""
    deployment = Deployment(num_blocks=1 + 20, max_num_seqs=6, max_num_batched_tokens=8)
    for number in range(50):
        deployment.submit(f"r{number}", list(range(number % 17 + 1)), greedy(30), client=f"c{number}".encode())
        if number % 5 == 0:
            deployment.step()
    for number in range(50):
        deployment.handle(e.ClientGone(f"c{number}".encode()))
        if deployment.plans[deployment.worker().identity] and number % 7 == 0:
            deployment.step()
    deployment.run()
    deployment.check_idle()
    assert not deployment.engine.connections._by_identity and not deployment.engine.connections._by_index


def test_one_clients_leaving_harms_no_other() -> None:
    deployment = Deployment()
    deployment.submit("stays", [1, 2, 3], client=b"a")
    deployment.submit("goes", [1, 2, 3], client=b"b")
    deployment.step()
    deployment.handle(e.ClientGone(b"b"))
    deployment.run()
    assert deployment.tokens["stays"] == deployment.golden("stays")
    deployment.check_idle()


def test_a_normal_end_is_said_once_and_an_abort_after_it_is_unknown() -> None:
    deployment = Deployment()
    deployment.submit("r", [1, 2, 3], greedy(2))
    deployment.run()
    finished = [a for a in deployment.actions if isinstance(a, e.ToClient) and isinstance(a.message, m.Finished)]
    assert len(finished) == 1
    deployment.abort("r")
    assert deployment.rejected["r"].code == "unknown_request"


def test_an_aborted_request_holds_no_block_after_the_abort() -> None:
    deployment = Deployment()
    deployment.submit("r", list(range(30)), greedy(20))
    deployment.step()
    pool = deployment.engine.replicas[0].manager.pool
    assert pool.num_free < pool.num_usable
    deployment.abort("r")
    assert pool.num_free == pool.num_usable
    deployment.run()
    deployment.check_idle()


def test_the_status_counts_what_there_is() -> None:
    deployment = Deployment(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(3):
        deployment.submit(f"r{number}", [number, 1, 2])
    deployment.step()
    status = deployment.engine.status(now=5.0)
    (replica,) = status.replicas
    assert (status.requests, status.waiting, replica.running, replica.state) == (3, 1, 2, "ready")
    assert (replica.total_blocks, replica.free_blocks) == (63, 63 - 3), "one of the two is in its second block"
    assert status.uptime_s == 5.0 and [w.state for w in status.workers] == ["ready"]
    deployment.kill()
    status = deployment.engine.status(now=6.0)
    assert (status.requests, status.waiting) == (3, 3)
    assert [w.state for w in status.workers] == ["dead"] and status.replicas[0].state == "down"


def test_a_slow_readers_batches_are_merged_in_order_and_none_is_lost() -> None:
    outbox = Outbox()
    outbox.add(b"a", m.Accepted("r", 1, 3))
    for step in range(100):
        outbox.add(b"a", m.TokenBatch(step, pack([1, 2]), pack([step, step]), pack([step + 5, step + 6])))
    outbox.add(b"a", m.Finished(1, "length", m.Usage(3, 100)))
    outbox.add(b"b", m.Accepted("s", 2, 3))
    said = []
    while (message := outbox.first(b"a")) is not None:
        said.append(message)
        outbox.pop(b"a")
    assert [type(message) for message in said] == [m.Accepted, m.TokenBatch, m.Finished]
    merged = said[1]
    assert isinstance(merged, m.TokenBatch)
    assert unpack(merged.indices).tolist() == [step for step in range(100) for _ in range(2)]
    assert unpack(merged.tokens).tolist() == [step + 5 + one for step in range(100) for one in range(2)]
    assert not outbox.holds(b"a") and outbox.identities() == [b"b"]
    outbox.drop(b"b")
    assert not outbox
