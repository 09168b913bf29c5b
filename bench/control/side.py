"""One side of the comparison: a process that runs cases, asked in JSON lines on stdin, answering in JSON lines.

Imports nothing of this project, so that another Python environment can run it too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def median_cpu(operation: Callable[[], object], repeat: int) -> float:
    """Seconds of this thread's CPU time that `operation` takes, the median of so many calls."""
    times = []
    for _ in range(repeat):
        before = time.thread_time()
        operation()
        times.append(time.thread_time() - before)
    return sorted(times)[len(times) // 2]


class Operations:
    """Times operations on many items: `seconds[name]` is the thread's CPU time for each block."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, operation: Callable[[Any], Any], items: Iterable[Any], blocks_each: int = 1) -> list[Any]:
        """operation(item) for each item; returns what they return. Nothing but the calls is in the time, no collection
        of garbage either: it would fall on whichever operation is under way."""
        items = list(items)
        gc.disable()
        before = time.thread_time()
        results = [operation(item) for item in items]
        self.seconds[name] = (time.thread_time() - before) / len(items) / blocks_each
        gc.enable()
        return results


def serve(cases: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Say `about`, then answer {"case": name, **arguments} with what the case returns, or {"error": text}, until EOF.

    What the cases print goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(dict(about)), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        gc.collect()
        try:
            answer = cases[question.pop("case")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
