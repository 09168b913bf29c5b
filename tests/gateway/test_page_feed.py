"""The live page's feed: free while nobody looks, one question at a time however many look, and lossy for the slow."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import ServerUnavailable
from gateway.errors import ApiError
from gateway.page.details import Details
from gateway.page.encoding import Frame, blocks, encode
from gateway.page.feed import KEPT_STEPS, MOST_VIEWERS, Feed
from gateway.upstream import Upstream
from protocol.messages import REQUEST_COLUMNS, STEP_COLUMNS, ReplicaSnapshot, ReplicaStatus, Snapshot, Status

STATUS = Status(5.0, 0, 0, (), (ReplicaStatus(0, "ready", 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0),), 0)


def snapshot(states: bytes = b"\0\1\1\1", uptime_s: float = 5.0, steps: tuple[int, ...] = ()) -> Snapshot:
    rows = np.zeros((len(steps), len(STEP_COLUMNS)), dtype="<i4")
    rows[:, 0] = steps
    status = msgspec.structs.replace(STATUS, uptime_s=uptime_s)
    replica = ReplicaSnapshot(0, 0, states, 0, 0, rows.tobytes())
    return Snapshot(status, (replica,), (), b"")


class Scripted(Upstream):
    """A scheduler that answers each question with what `answer` makes of its number; an error is raised."""

    def __init__(self, answer: Callable[[int], Snapshot | Exception]):
        self.answer = answer
        self.questions: list[tuple[int, ...]] = []
        self.under_way = 0

    async def client(self) -> Any:
        return self

    async def snapshot(self, steps_after: tuple[int, ...]) -> Snapshot:
        assert self.under_way == 0, "two questions at once"
        self.under_way += 1
        await asyncio.sleep(0)
        self.under_way -= 1
        self.questions.append(tuple(steps_after))
        answer = self.answer(len(self.questions))
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(10):
            return await work()

    return asyncio.run(limited())


def data(event: bytes | None) -> dict[str, Any]:
    assert event is not None and event.endswith(b"\n\n")
    return dict(json.loads(event.split(b"data: ", 1)[1]))


def changing(number: int) -> Snapshot:
    return snapshot(bytes([0, number % 4, 1, 2]), uptime_s=float(number))


def test_nobody_looks_and_nothing_is_asked() -> None:
    async def work() -> None:
        upstream = Scripted(changing)
        feed = Feed(upstream, pause_s=0)
        await asyncio.sleep(0.01)
        assert upstream.questions == []
        viewer = feed.join()
        await viewer.next()
        await viewer.close()
        await viewer.close()  # leaving twice is leaving once
        asked = len(upstream.questions)
        await asyncio.sleep(0.01)
        assert len(upstream.questions) == asked >= 1

    run(work)


def test_many_viewers_cost_no_more_questions_than_one_and_a_slow_one_sees_the_newest() -> None:
    async def work() -> None:
        upstream = Scripted(changing)
        feed = Feed(upstream, pause_s=0)
        fast, slow = [feed.join() for _ in range(20)], feed.join()
        first = data(await slow.next())
        for _ in range(50):
            await asyncio.gather(*(viewer.next() for viewer in fast))
        asked = len(upstream.questions)
        assert asked <= 200, "for 1,000 frames that were taken"
        latest = data(await slow.next())
        assert latest["uptime_s"] - first["uptime_s"] >= 49, "what came between is lost"
        assert data(await slow.next())["uptime_s"] > latest["uptime_s"]
        for viewer in [*fast, slow]:
            await viewer.close()

    run(work)


def test_a_scheduler_that_is_gone_is_told_once_and_its_successor_shown_whole() -> None:
    def answer(number: int) -> Snapshot | Exception:
        if 3 <= number < 40:
            return ServerUnavailable("gone")
        return snapshot(uptime_s=float(number if number < 3 else number - 39), steps=(1,) if number > 40 else ())

    async def work() -> None:
        upstream = Scripted(answer)
        viewer = Feed(upstream, pause_s=0).join()
        seen = [await viewer.next() for _ in range(3)]
        await viewer.close()
        names = [event.split(b"\n")[0].decode() for event in seen if event]
        assert names == ["event: snapshot", "event: lost", "event: snapshot"]
        assert data(seen[2])["whole"] and data(seen[2])["replicas"][0]["blocks"]["whole"]

    run(work)


def test_steps_reach_every_viewer_once_and_only_the_last_are_kept() -> None:
    def answer(number: int) -> Snapshot:
        new = range(10 * number - 9, 10 * number + 1)
        return snapshot(bytes([0, number % 4]), uptime_s=float(number), steps=tuple(new))

    async def work() -> None:
        upstream = Scripted(answer)
        viewer = Feed(upstream, pause_s=0).join()
        numbers: list[int] = []
        while len(numbers) < 500:
            numbers += [step[0] for step in data(await viewer.next())["replicas"][0]["new_steps"]]
        assert numbers == list(range(1, len(numbers) + 1))
        assert upstream.questions[:3] == [(), (10,), (20,)]
        await viewer.close()

    run(work)
    rows = np.zeros((KEPT_STEPS, len(STEP_COLUMNS)), dtype=np.int32)
    rows[:, 0] = np.arange(KEPT_STEPS)
    whole = data(encode(None, Frame(1, 0, snapshot(), (rows,))))
    assert len(whole["replicas"][0]["new_steps"]) == KEPT_STEPS


def test_details_are_asked_for_one_at_a_time_with_a_pause_between() -> None:
    async def work() -> None:
        upstream = Scripted(changing)
        details = Details(upstream, pause_s=0.01)
        loop = asyncio.get_running_loop()
        asked: list[float] = []

        async def question(client: Any) -> Snapshot:
            asked.append(loop.time())
            return await upstream.snapshot(())  # fails if another is under way

        await asyncio.gather(*(details.ask(question) for _ in range(8)))
        assert all(later - earlier >= 0.009 for earlier, later in itertools.pairwise(asked))

    run(work)


def test_there_is_a_limit_to_the_number_of_pages() -> None:
    async def work() -> None:
        feed = Feed(Scripted(changing), pause_s=0)
        viewers = [feed.join() for _ in range(MOST_VIEWERS)]
        with pytest.raises(ApiError) as refused:
            feed.join()
        assert refused.value.status == 503
        for viewer in viewers:
            await viewer.close()
        await feed.join().close()

    run(work)


def test_requests_are_sent_only_when_they_changed() -> None:
    row = np.arange(len(REQUEST_COLUMNS), dtype="<i4").tobytes()
    one = msgspec.structs.replace(snapshot(), request_ids=("r",), requests=row)
    none = np.zeros((0, len(STEP_COLUMNS)), dtype=np.int32)
    base = Frame(1, 0, one, (none,))
    assert data(encode(None, base))["requests"] == [["r", *range(len(REQUEST_COLUMNS))]]
    assert "requests" not in data(encode(base, Frame(2, 0, one, (none,))))
    assert data(encode(base, Frame(2, 0, snapshot(), (none,))))["requests"] == []


def applied(seen: bytes | None, change: dict[str, Any]) -> bytes:
    """What the page makes of a change (world.js does the same)."""
    cells = bytearray(change["size"]) if change["whole"] else bytearray(seen or b"")
    if "raw" in change:
        return base64.b64decode(change["raw"])
    runs = base64.b64decode(change.get("runs", ""))
    n = len(runs) // 9
    starts, lengths = np.frombuffer(runs[: 4 * n], "<i4"), np.frombuffer(runs[4 * n : 8 * n], "<i4")
    for start, length, value in zip(starts, lengths, runs[8 * n :], strict=True):
        cells[start : start + length] = bytes([value]) * length
    return bytes(cells)


STATES = st.lists(st.integers(0, 4), max_size=60).map(bytes)


@given(seen=st.none() | STATES, now=STATES)
def test_a_change_leads_from_what_was_seen_to_what_is(seen: bytes | None, now: bytes) -> None:
    change = blocks(seen, now)
    assert applied(seen, change) == now


def test_a_change_is_as_long_as_what_changed() -> None:
    calm = bytes(100_000)
    assert len(json.dumps(blocks(None, calm))) < 100
    busy = bytearray(calm)
    busy[500:600] = b"\3" * 100
    busy[70_000] = 4
    assert len(json.dumps(blocks(calm, bytes(busy)))) < 120
    noise = np.random.default_rng(0).integers(0, 5, 100_000, dtype=np.uint8).tobytes()
    assert len(json.dumps(blocks(calm, noise))) < 140_000  # never more than the bytes themselves, base64
    assert "runs" not in blocks(noise, noise) and "raw" not in blocks(noise, noise)
