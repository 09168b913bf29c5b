"""Snapshots from the scheduler to whoever looks. Nobody looks: nothing is asked, nothing is computed.

One question is under way at a time, and the next follows a pause after its answer, however many viewers there are. A
viewer takes the newest frame when it has written its last one; what came between, it never sees.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec
import numpy as np

from client import ClientError
from gateway.errors import ApiError, unavailable
from gateway.page.encoding import Frame, encode, step_rows
from gateway.upstream import Upstream
from protocol.messages import STEP_COLUMNS, Snapshot, Status

PAUSE_S = 0.12
"""Between an answer and the next question: at most 8 snapshots a second."""
REST_S = 1.0
"""A frame that equals the last one is passed on only after this; it says that the line is alive."""
ANSWER_S = 2.0
"""A scheduler that lives answers in milliseconds."""
KEPT_STEPS = 300
MOST_VIEWERS = 64
_KEPT_ENCODINGS = 16

log = logging.getLogger("gateway")


class Feed:
    """Use from one event loop."""

    def __init__(self, upstream: Upstream, *, pause_s: float = PAUSE_S):
        self._upstream = upstream
        self._pause_s = pause_s
        self._viewers = 0
        self._asker: asyncio.Task[None] | None = None
        self._frame: Frame | None = None
        self._changed = asyncio.Event()
        self._encoded: dict[tuple[int, int], bytes] = {}
        """By serials of two frames: viewers at the same pace share one encoding."""

    def join(self) -> Viewer:
        """One more viewer; the first one starts the questions. Raises ApiError when there are too many."""
        if self._viewers >= MOST_VIEWERS:
            raise unavailable(f"{MOST_VIEWERS} pages are open already")
        self._viewers += 1
        if self._asker is None:
            self._asker = asyncio.create_task(self._ask())
        return Viewer(self)

    async def leave(self) -> None:
        """One viewer less; the last one ends the questions and what was known is forgotten."""
        self._viewers -= 1
        if self._viewers == 0 and self._asker is not None:
            asker, self._asker, self._frame = self._asker, None, None
            self._encoded.clear()
            asker.cancel()
            with suppress(asyncio.CancelledError):
                await asker

    async def after(self, base: Frame | None) -> tuple[Frame, bytes]:
        """The newest frame once it is newer than `base`, and as an event for who has seen `base`."""
        while self._frame is None or (base is not None and self._frame.serial <= base.serial):
            if self._asker is not None and self._asker.done():
                raise ApiError(500, "internal error; the gateway's log says more")
            await self._changed.wait()
        frame = self._frame
        key = (base.serial if base else 0, frame.serial)
        if key not in self._encoded:
            while len(self._encoded) >= _KEPT_ENCODINGS:
                del self._encoded[next(iter(self._encoded))]
            self._encoded[key] = encode(base, frame)
        return frame, self._encoded[key]

    async def _ask(self) -> None:
        try:
            serial, told_at = 0, float("-inf")
            while True:
                frame = self._next_frame(serial + 1, await self._snapshot())
                now = asyncio.get_running_loop().time()
                if not self._same(frame) or now - told_at >= REST_S:
                    serial, told_at = frame.serial, now
                    self._frame = frame
                    self._wake()
                await asyncio.sleep(self._pause_s)
        except Exception:
            log.exception("the live page's feed failed")
            raise
        finally:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _snapshot(self) -> Snapshot | None:
        known = self._frame.steps if self._frame and self._frame.snapshot else ()
        after = [int(steps[-1, 0]) if len(steps) else 0 for steps in known]
        try:
            async with asyncio.timeout(ANSWER_S):
                return await (await self._upstream.client()).snapshot(after)
        except (ClientError, TimeoutError):
            return None

    def _next_frame(self, serial: int, snapshot: Snapshot | None) -> Frame:
        last = self._frame
        life = last.life if last else 0
        if snapshot is None:
            return Frame(serial, life if last and last.snapshot is None else life + 1, None)
        known = last.steps if last else ()
        if last and last.snapshot and last.snapshot.status.uptime_s > snapshot.status.uptime_s:
            life, known = life + 1, ()  # another scheduler
        steps = []
        for place, view in enumerate(snapshot.replicas):
            new = step_rows(view.steps)
            old = known[place] if place < len(known) else np.zeros((0, len(STEP_COLUMNS)), dtype=np.int32)
            steps.append(np.concatenate((old, new))[-KEPT_STEPS:])
        return Frame(serial, life, snapshot, tuple(steps))

    def _same(self, frame: Frame) -> bool:
        """Whether it says what the last one said."""
        last = self._frame
        if last is None or last.life != frame.life:
            return False
        if last.snapshot is None or frame.snapshot is None:
            return last.snapshot is frame.snapshot
        return _lasting(last.snapshot) == _lasting(frame.snapshot)


def _lasting(snapshot: Snapshot) -> tuple[object, ...]:
    status: Status = msgspec.structs.replace(snapshot.status, uptime_s=0.0)
    states = tuple((view.blocks, view.wasted_slots) for view in snapshot.replicas)
    return status, states, snapshot.request_ids, snapshot.requests


class Viewer:
    """The events of one page, from the newest frame at each time. See `gateway.sse.Events`."""

    def __init__(self, feed: Feed):
        self._feed = feed
        self._base: Frame | None = None
        self._left = False

    async def next(self) -> bytes | None:
        """Waits for news; never ends by itself."""
        self._base, text = await self._feed.after(self._base)
        return text

    async def close(self) -> None:
        if not self._left:
            self._left = True
            await self._feed.leave()
