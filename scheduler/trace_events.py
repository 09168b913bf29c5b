"""Chrome's trace event format, which Perfetto and chrome://tracing read: one JSON object an event. Pure.

Moments are seconds of one monotonic clock; in the file they are microseconds. A slice (X) belongs to a thread of a
process and lies within the slices around it; an async slice (b, e) belongs to an id and may overlap with others.
Source: "Trace Event Format", Google.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()
Arguments = Mapping[str, Any]
NONE: Arguments = {}


def _event(**fields: Any) -> bytes:
    return _ENCODER.encode(fields) + b",\n"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def process(pid: int, name: str, threads: Mapping[int, str], order: int) -> bytes:
    """Names of a process and its threads; lower `order` stands higher."""
    lines = [
        _event(ph="M", name="process_name", pid=pid, tid=0, args={"name": name}),
        _event(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": order}),
    ]
    lines += [
        _event(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": text}) for tid, text in threads.items()
    ]
    return b"".join(lines)


def piece(pid: int, tid: int, name: str, began: float, seconds: float, args: Arguments = NONE) -> bytes:
    """A slice of a thread."""
    return _event(ph="X", pid=pid, tid=tid, name=name, ts=_us(began), dur=_us(seconds), args=args)


def begin(pid: int, kind: str, name: str, key: str, at: float, args: Arguments = NONE) -> bytes:
    """An async slice of `key` begins, within those of the same key that are open."""
    return _event(ph="b", pid=pid, tid=0, cat=kind, id=key, name=name, ts=_us(at), args=args)


def end(pid: int, kind: str, name: str, key: str, at: float, args: Arguments = NONE) -> bytes:
    """The innermost open async slice of `key` ends; it is called `name`."""
    return _event(ph="e", pid=pid, tid=0, cat=kind, id=key, name=name, ts=_us(at), args=args)


def arrow(key: int, source: tuple[int, int, float], target: tuple[int, int, float]) -> bytes:
    """From the slice around one (process, thread, moment) to the slice around another."""
    (pid, tid, at), (to_pid, to_tid, to_at) = source, target
    return _event(ph="s", cat="step", name="step", id=key, pid=pid, tid=tid, ts=_us(at)) + _event(
        ph="f", bp="e", cat="step", name="step", id=key, pid=to_pid, tid=to_tid, ts=_us(to_at)
    )


def mark(pid: int, tid: int, name: str, at: float, args: Arguments = NONE) -> bytes:
    """A moment of a process."""
    return _event(ph="i", s="p", pid=pid, tid=tid, name=name, ts=_us(at), args=args)


def counter(pid: int, name: str, at: float, values: Mapping[str, float]) -> bytes:
    """Values of a curve from `at` on."""
    return _event(ph="C", pid=pid, tid=0, name=name, ts=_us(at), args=values)
