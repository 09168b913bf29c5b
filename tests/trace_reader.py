"""Reads a trace and proves that it is one: what Perfetto would silently drop or draw wrong is an error here."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPSILON_US = 0.01
"""Moments are rounded to nanoseconds."""


@dataclass
class Slice:
    """A slice of a thread, or an async one; ts and dur in µs. `depth`: slices around it."""

    name: str
    pid: int
    ts: float
    dur: float
    args: dict[str, Any]
    depth: int = 0

    @property
    def end(self) -> float:
        return self.ts + self.dur


@dataclass
class Trace:
    """processes: pid → name. threads: (pid, tid) → slices in order. asynchronous: (cat, id) → slices in order of their
    beginning, with depth. marks: name → args of each. counters: name → values."""

    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    asynchronous: dict[tuple[str, str], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    arrows: int = 0

    def named(self, name: str) -> list[Slice]:
        """Thread slices of that name."""
        return [piece for pieces in self.threads.values() for piece in pieces if piece.name == name]

    def phases(self, request_id: str) -> list[Slice]:
        """The slices of one request, its own first."""
        (found,) = [s for (kind, _), s in self.asynchronous.items() if kind == "request" and s[0].name == request_id]
        return found


def read_file(path: Path) -> Trace:
    """A file as it is written; strict JSON, so it must be closed."""
    return read(json.loads(path.read_text()))


def read_pieces(pieces: bytes) -> Trace:
    """What the server sends: objects with a comma behind each."""
    return read([json.loads(line.removesuffix(b",")) for line in pieces.splitlines()])


def read(events: list[dict[str, Any]]) -> Trace:
    """Check and sort the events. Raises AssertionError for what is not a well-formed trace."""
    trace = Trace()
    open_slices: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    sources: dict[int, tuple[int, int, float]] = {}
    targets: dict[int, tuple[int, int, float]] = {}
    for event in sorted(events, key=lambda event: event.get("ts", -1.0)):  # stable, as Perfetto sorts
        kind, pid, tid = event["ph"], event["pid"], event["tid"]
        if kind == "M":
            if event["name"] == "process_name":
                trace.processes[pid] = event["args"]["name"]
            continue
        assert event["ts"] >= 0 and pid in trace.processes, event
        match kind:
            case "X":
                assert event["dur"] >= 0, event
                piece = Slice(event["name"], pid, event["ts"], event["dur"], event["args"])
                trace.threads[pid, tid].append(piece)
            case "b":
                key = (event["cat"], event["id"])
                piece = Slice(event["name"], pid, event["ts"], -1.0, event["args"], len(open_slices[key]))
                open_slices[key].append(piece)
                trace.asynchronous[key].append(piece)
            case "e":
                piece = open_slices[event["cat"], event["id"]].pop()
                assert piece.name == event["name"], f"{event} ends {piece}"
                piece.dur = event["ts"] - piece.ts
                piece.args = {**piece.args, **event["args"]}
            case "s" | "f":
                ends = sources if kind == "s" else targets
                assert event["id"] not in ends, f"{event} comes twice"
                ends[event["id"]] = (pid, tid, event["ts"])
            case "i":
                trace.marks[event["name"]].append(event["args"])
            case "C":
                trace.counters[event["name"]].append(event["args"])
            case _:
                raise AssertionError(f"unknown event {event}")
    assert not any(open_slices.values()), f"never ended: {[s for s in open_slices.values() if s]}"
    for thread, pieces in trace.threads.items():
        pieces.sort(key=lambda piece: (piece.ts, -piece.dur))
        _check_nesting(thread, pieces)
    assert sources.keys() == targets.keys(), "an arrow has one end"
    for pid, tid, at in [*sources.values(), *targets.values()]:
        outer = trace.threads[pid, tid]
        place = bisect_right(outer, at + EPSILON_US, key=lambda piece: piece.ts)
        nearest = outer[max(0, place - 8) : place]  # at most that deep are the slices before it
        assert any(at <= piece.end + EPSILON_US for piece in nearest), (
            f"an arrow begins or ends outside all slices: {(pid, tid, at)}"
        )
    trace.arrows = len(sources)
    return trace


def _check_nesting(thread: tuple[int, int], pieces: list[Slice]) -> None:
    around: list[Slice] = []
    for piece in pieces:
        while around and around[-1].end <= piece.ts + EPSILON_US:
            around.pop()
        if around:
            assert piece.end <= around[-1].end + EPSILON_US, f"{thread}: {piece} crosses the end of {around[-1]}"
        piece.depth = len(around)
        around.append(piece)
