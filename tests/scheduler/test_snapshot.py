"""What a snapshot says is what the books say, and what it costs does not depend on how many blocks there are."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.arrays import unpack
from scheduler import events as e
from scheduler.block_pool import BlockPool
from scheduler.snapshot import MOST_OWNERS, MOST_REQUESTS
from scheduler.step_log import KEPT_STEPS
from tests.scheduler.deployment import Deployment, greedy


def ask(deployment: Deployment, question: m.ClientToScheduler) -> Any:
    """The answer, as it comes off the wire."""
    actions = deployment.engine.handle(e.FromClient(b"viewer", question), deployment.now)
    (answer,) = (a.message for a in actions if isinstance(a, e.ToClient) and a.identity == b"viewer")
    return codec.scheduler_to_client.decode(codec.encode(answer))


def rows_of(snapshot: m.Snapshot) -> list[dict[str, int]]:
    table = unpack(snapshot.requests).reshape(-1, len(m.REQUEST_COLUMNS)).tolist()
    return [dict(zip(m.REQUEST_COLUMNS, row, strict=True)) for row in table]


def steps_of(replica: m.ReplicaSnapshot) -> list[dict[str, int]]:
    table = unpack(replica.steps).reshape(-1, len(m.STEP_COLUMNS)).tolist()
    return [dict(zip(m.STEP_COLUMNS, row, strict=True)) for row in table]


def state_in_words(deployment: Deployment, replica: int, block_id: int) -> str:
    """From the definition, by whoever names the block."""
    pool = deployment.engine.replicas[replica].manager.pool
    tables = [t for r in deployment.engine.replicas[replica].rows.running() for t in r.blocks]
    owners = sum(b.block_id == block_id for table in tables for b in table)
    if block_id == 0:
        return "null"
    if owners:
        return "used" if owners == 1 else "shared"
    return "free" if pool.blocks[block_id].block_hash is None else "cached"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_snapshot_agrees_with_the_books_after_any_history(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(0,), (0, 8)]))
    deployment = Deployment(windows=windows, num_blocks=[24, 16], replicas=2, max_num_seqs=4)
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 14))):
        deployment.now += 1.0
        match data.draw(st.sampled_from(["submit", "submit", "step", "step", "abort", "die"])):
            case "submit":
                prompt = [7] * data.draw(st.integers(1, 20)) + [data.draw(st.integers(2, 3))]
                names.append(f"r{len(names)}")
                deployment.submit(names[-1], prompt, greedy(data.draw(st.integers(1, 9))))
            case "step":
                for worker in deployment.workers:
                    if worker is not None and deployment.plans[worker.identity]:
                        deployment.step(worker.replica)
            case "abort" if names:
                deployment.abort(data.draw(st.sampled_from(names)))
            case "die" if deployment.workers[0] is not None:
                deployment.kill(0)
                deployment.start(0)
    snapshot = ask(deployment, m.GetSnapshot())
    engine = deployment.engine
    assert set(snapshot.request_ids) == set(engine.requests)
    for request_id, row in zip(snapshot.request_ids, rows_of(snapshot), strict=True):
        request = engine.requests[request_id]
        assert ("waiting", "running", "draining")[row["state"]] == request.state.value
        table = ask(deployment, m.GetTable(request_id))
        assert [unpack(ids).tolist() for ids in table.tables] == [[b.block_id for b in t] for t in request.blocks]
        assert row["output"] == len(deployment.tokens[request_id])
    for view, replica in zip(snapshot.replicas, engine.replicas, strict=True):
        states = [m.BLOCK_STATES[byte] for byte in view.blocks]
        assert states == [state_in_words(deployment, replica.index, i) for i in range(replica.num_blocks)]
        slots = [len([b for b in t if not b.is_null]) * 4 for r in replica.rows.running() for t in r.blocks]
        assert view.allocated_slots == sum(slots) and 0 <= view.wasted_slots <= view.allocated_slots
        for block_id in range(replica.num_blocks):
            info = ask(deployment, m.GetBlock(replica.index, block_id))
            assert info.state == states[block_id] and info.ref_cnt == len(info.owners)
            for owner, index in zip(info.owners, unpack(info.indices).tolist(), strict=True):
                assert engine.requests[owner].blocks[info.group][index].block_id == block_id


class _Untouched(list[Any]):
    """A pool's blocks, none of which may be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("the blocks were walked")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a block was looked at")


def test_a_snapshot_looks_at_no_block_and_lists_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(num_blocks=100_000, max_num_seqs=8)
    deployment.engine.config = msgspec.structs.replace(deployment.config, debug_checks=False)
    for number in range(MOST_REQUESTS + 50):
        deployment.submit(f"r{number}", [number % 900 + 2] * 5, greedy(50))
    for _ in range(3):
        deployment.step()
    pool = deployment.engine.replicas[0].manager.pool
    monkeypatch.setattr(pool, "blocks", _Untouched(pool.blocks))
    for request in deployment.engine.replicas[0].rows.running():
        monkeypatch.setattr(request, "blocks", _Untouched())
    snapshot = ask(deployment, m.GetSnapshot())
    assert len(snapshot.replicas[0].blocks) == 100_000
    assert len(snapshot.request_ids) == MOST_REQUESTS
    assert len(codec.encode(snapshot)) < 100_000 + 64 * MOST_REQUESTS + 4096
    assert [row["state"] for row in rows_of(snapshot)][:9] == [1] * 8 + [0]


def test_steps_are_told_once_and_the_last_ones_are_kept() -> None:
    deployment = Deployment()
    deployment.submit("r", [2, 3, 4], greedy(10))
    deployment.now = 2.0
    deployment.step()
    first = ask(deployment, m.GetSnapshot())
    (step,) = steps_of(first.replicas[0])
    assert (step["number"], step["step"], step["tokens"], step["rows"]) == (1, 0, 3, 1)
    assert (step["finished_ms"], step["round_us"]) == (2000, 2_000_000)
    deployment.step()
    later = steps_of(ask(deployment, m.GetSnapshot((1,))).replicas[0])
    assert [step["number"] for step in later] == [2]
    assert steps_of(ask(deployment, m.GetSnapshot((2,))).replicas[0]) == []
    deployment.kill()
    deployment.start()
    deployment.submit("long", [5], greedy(KEPT_STEPS))
    deployment.run()
    kept = steps_of(ask(deployment, m.GetSnapshot()).replicas[0])
    assert len(kept) == KEPT_STEPS and kept[-1]["epoch"] == 1
    assert [b["number"] - a["number"] for a, b in itertools.pairwise(kept)] == [1] * (KEPT_STEPS - 1)
    assert len(steps_of(ask(deployment, m.GetSnapshot((10**6,))).replicas[0])) == KEPT_STEPS  # of an earlier scheduler


def test_a_record_has_what_the_wire_and_the_worker_took() -> None:
    deployment = Deployment()
    deployment.submit("r", [2, 3], greedy(1))
    worker = deployment.worker()
    plan = deployment.plans[worker.identity][0]
    deployment.engine.plan_encoded(worker.identity, plan, 123, 45e-6)
    result = deployment.run_plan()
    timed = msgspec.structs.replace(result, timings_us=np.arange(1, 6, dtype="<i4").tobytes())
    deployment.results[worker.identity][0] = timed
    deployment.deliver()
    (step,) = steps_of(ask(deployment, m.GetSnapshot()).replicas[0])
    assert (step["plan_bytes"], step["encode_us"]) == (123, 45)
    assert [step[name] for name in m.STEP_COLUMNS[9:14]] == [1, 2, 3, 4, 5]


def test_a_block_tells_its_owners_its_name_and_its_age() -> None:
    deployment = Deployment(max_num_seqs=MOST_OWNERS + 4, max_num_batched_tokens=256)
    deployment.now = 10.0
    deployment.submit("first", [7] * 9, greedy(20))
    deployment.step()
    for number in range(MOST_OWNERS + 2):
        deployment.submit(f"twin{number}", [7] * 9, greedy(20))
    deployment.step()
    deployment.now = 13.5
    block_id = unpack(ask(deployment, m.GetTable("first")).tables[0]).tolist()[0]
    info = ask(deployment, m.GetBlock(0, block_id))
    assert info.state == "shared" and info.ref_cnt == MOST_OWNERS + 3
    assert len(info.owners) == MOST_OWNERS and info.owners[0] == "first" and len(info.block_hash) == 16
    assert info.age_s == 3.5 and info.group == 0
    untouched = ask(deployment, m.GetBlock(0, 60))
    assert (untouched.state, untouched.age_s, untouched.owners) == ("free", -1.0, ())


def test_what_is_not_there_is_said_to_be_not_there() -> None:
    deployment = Deployment(replicas=2)
    assert ask(deployment, m.GetBlock(5, 1)).state == ""
    assert ask(deployment, m.GetBlock(0, 10**6)).state == ""
    assert ask(deployment, m.GetTable("nobody")).tables == ()
    deployment.kill(1)
    assert ask(deployment, m.GetBlock(1, 1)).state == ""
    assert ask(deployment, m.GetSnapshot()).replicas[1].blocks == b""


def test_a_kill_is_passed_on_only_for_the_incarnation_that_serves() -> None:
    deployment = Deployment()
    deployment.handle(e.FromSupervisor(b"supervisor", m.Watch()))
    old = deployment.kill()
    new = deployment.start()

    def passed_on(incarnation: str) -> list[tuple[bytes, str]]:
        kill = m.KillWorker(new.worker_id, incarnation, "to see it recover")
        actions = deployment.handle(e.FromSupervisor(b"gateway", kill))
        return [
            (a.identity, a.message.incarnation)
            for a in actions
            if isinstance(a, e.ToSupervisor) and isinstance(a.message, m.KillWorker)
        ]

    assert passed_on(old.incarnation) == []
    assert passed_on(new.incarnation) == [(b"supervisor", new.incarnation)]
    assert deployment.engine.replicas[0].ready, "it is lost when it has died, not before"


def test_state_bytes_are_part_of_the_books() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.states[block.block_id] = 1
    with pytest.raises(AssertionError, match="state byte"):
        pool.check()
