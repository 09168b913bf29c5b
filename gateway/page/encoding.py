"""Snapshots as events for a browser: whole, or as what changed since an earlier one. Pure.

Block states travel as runs: (start, length, value) where a stretch of blocks got the same state. That is short for a
map at rest, for one that fills, and for a step's few changes; where it is not, the bytes themselves travel.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.arrays import unpack
from protocol.messages import REQUEST_COLUMNS, STEP_COLUMNS, ReplicaStatus, Snapshot, WorkerStatus

_RUN_BYTES = 9


@dataclass(frozen=True)
class Frame:
    """One moment as the gateway knows it. snapshot None: the scheduler does not answer. steps: by replica the records
    kept, as rows of STEP_COLUMNS. life: rises when the scheduler was replaced; nothing is compared across lives."""

    serial: int
    life: int
    snapshot: Snapshot | None
    steps: tuple[NDArray[np.int32], ...] = ()


def event(name: str, content: Any) -> bytes:
    """One server-sent event with a JSON content."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


def encode(base: Frame | None, frame: Frame) -> bytes:
    """`frame` for a viewer who has seen `base`; None: who has seen nothing."""
    if frame.snapshot is None:
        return event("lost", {})
    if base is None or base.snapshot is None or base.life != frame.life:
        return event("snapshot", _content(None, frame, frame.snapshot))
    return event("snapshot", _content(base, frame, frame.snapshot))


def _content(base: Frame | None, frame: Frame, snapshot: Snapshot) -> dict[str, Any]:
    before = base.snapshot if base else None
    status = snapshot.status
    replicas = []
    for place, (counters, view) in enumerate(zip(status.replicas, snapshot.replicas, strict=True)):
        seen = before.replicas[place].blocks if before and before.replicas[place].epoch == view.epoch else None
        steps = frame.steps[place]
        if base is not None and len(base.steps[place]):
            steps = steps[steps[:, 0] > base.steps[place][-1, 0]]
        replicas.append(
            {
                **_fields(counters),
                "allocated_slots": view.allocated_slots,
                "wasted_slots": view.wasted_slots,
                "blocks": blocks(seen, view.blocks),
                "new_steps": steps.tolist(),
            }
        )
    content: dict[str, Any] = {
        "whole": base is None,
        "uptime_s": round(status.uptime_s, 3),
        "waiting": status.waiting,
        "unfinished": status.requests,
        "workers": [_fields(worker) for worker in status.workers],
        "replicas": replicas,
    }
    if before is None or (before.request_ids, before.requests) != (snapshot.request_ids, snapshot.requests):
        rows = unpack(snapshot.requests).reshape(-1, len(REQUEST_COLUMNS)).tolist()
        content["requests"] = [[name, *row] for name, row in zip(snapshot.request_ids, rows, strict=True)]
    return content


def _fields(struct: ReplicaStatus | WorkerStatus) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def blocks(seen: bytes | None, now: bytes) -> dict[str, Any]:
    """How a map becomes `now`: {"size", "whole", and "runs" or "raw"}, base64. runs: all starts, all lengths (int32
    little-endian), all values (bytes). seen: what the viewer has; None: nothing."""
    whole = seen is None or len(seen) != len(now)
    target = np.frombuffer(now, dtype=np.uint8)
    changed = np.arange(len(target)) if whole else np.nonzero(target != np.frombuffer(seen or b"", np.uint8))[0]
    answer: dict[str, Any] = {"size": len(now), "whole": whole}
    if len(changed):
        values = target[changed]
        borders = np.flatnonzero((np.diff(changed) != 1) | (np.diff(values) != 0)) + 1
        first = np.concatenate(([0], borders))
        if len(first) * _RUN_BYTES > len(now):
            return {**answer, "raw": _base64(now)}
        lengths = np.diff(np.append(first, len(changed)))
        parts = changed[first].astype("<i4").tobytes() + lengths.astype("<i4").tobytes() + values[first].tobytes()
        answer["runs"] = _base64(parts)
    return answer


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def step_rows(data: bytes) -> NDArray[np.int32]:
    """ReplicaSnapshot.steps as rows."""
    return unpack(data, "steps").reshape(-1, len(STEP_COLUMNS))
