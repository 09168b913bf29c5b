"""The steps of one replica: those in flight and the last finished ones, each with how long every part of it took.

One ring for whoever wants to look: metrics, traces, the page. Keeping it costs a few assignments a step; numbers are
made only when asked for. All moments are seconds of one monotonic clock. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import INT32, pack
from protocol.messages import STEP_COLUMNS

KEPT_STEPS = 256
_TIMINGS = 6
"""Leading elements of ModelRunnerOutput.timings_us: apply, commit, forward, sample, idle, rest."""


@dataclass(slots=True)
class StepRecord:
    """One step. Moments and durations in seconds; what has not happened yet is 0."""

    epoch: int
    step: int
    num_tokens: int
    """Tokens computed."""
    num_running: int
    """Rows that run in it."""
    num_prefill_tokens: int
    """Tokens of the rows that run more than one."""
    prefill_position: float
    """Where in their sequences those are, on average."""
    num_sampling: int
    """Rows that sample a token in it."""
    planned_at: float
    """When making the plan began."""
    schedule_s: float
    helped: bool = False
    """Whether others rested for its prompts' sake when it was planned."""
    number: int = 0
    """Counts the finished steps of the replica over all its epochs, from 1; 0: not finished."""
    plan_bytes: int = 0
    encode_s: float = 0.0
    sent_at: float = 0.0
    """When the frame was ready for the socket."""
    started_at: float = 0.0
    """When the worker began with it."""
    idle_s: float = 0.0
    """How long the worker had nothing to do before, its rest not counted."""
    rest_s: float = 0.0
    """How long it waited before, as it was told, for the sake of another replica's prompt."""
    apply_s: float = 0.0
    commit_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    returned_at: float = 0.0
    """When the scheduler took the result up."""
    result_s: float = 0.0
    """How long it took to make the result count."""
    num_committed: int = 0
    """Tokens that counted."""

    @property
    def work_s(self) -> float:
        """What the worker spent on it."""
        return self.apply_s + self.commit_s + self.forward_s + self.sample_s

    @property
    def wire_s(self) -> float:
        """From the socket here to the start there, without the time the worker still spent on the step before."""
        return max(0.0, min(self.started_at - self.sent_at, self.idle_s))

    @property
    def return_s(self) -> float:
        """From the worker's end until the scheduler takes the result up, what it did meanwhile included."""
        return max(0.0, self.returned_at - self.started_at - self.work_s)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in the order of `protocol.histograms.STAGES`."""
        return {
            "schedule": self.schedule_s,
            "encode": self.encode_s,
            "wire": self.wire_s,
            "apply": self.apply_s,
            "commit": self.commit_s,
            "forward": self.forward_s,
            "sample": self.sample_s,
            "return": self.return_s,
            "result": self.result_s,
        }

    def place(self, started_at: float, timings_us: bytes) -> None:
        """The worker's account: when it began, and timings_us as in ModelRunnerOutput (missing ones count as 0).

        If its clock cannot be ours (another machine), its work is put midway between sending and return.
        """
        seconds = [0.0] * _TIMINGS
        known = min(_TIMINGS, len(timings_us) // INT32.itemsize)
        seconds[:known] = (np.frombuffer(timings_us, dtype=INT32, count=known) / 1e6).tolist()
        self.apply_s, self.commit_s, self.forward_s, self.sample_s, idle_s, self.rest_s = seconds
        self.idle_s = max(0.0, idle_s - self.rest_s)
        sent = self.sent_at or self.planned_at
        if not sent <= started_at <= self.returned_at:
            started_at = sent + max(0.0, self.returned_at - sent - self.work_s) / 2
        self.started_at = started_at


class StepLog:
    """Survives epochs: the numbers of its records go on."""

    def __init__(self) -> None:
        self._in_flight: dict[int, StepRecord] = {}
        """By step; as few as steps are in flight."""
        self._finished: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._number = 0

    def __len__(self) -> int:
        """Finished steps that are kept."""
        return len(self._finished)

    def __iter__(self) -> Iterator[StepRecord]:
        """The finished ones, oldest first."""
        return iter(self._finished)

    def planned(self, record: StepRecord) -> None:
        """A plan was made."""
        self._in_flight[record.step] = record

    def encoded(self, step: int, num_bytes: int, seconds: float, at: float) -> None:
        """The plan of `step` became a frame of so many bytes, ready at `at`."""
        record = self._in_flight.get(step)
        if record is not None:
            record.plan_bytes, record.encode_s, record.sent_at = num_bytes, seconds, at

    def returned(self, step: int, timings_us: bytes, started_at: float, at: float) -> StepRecord | None:
        """The result of `step` counts; it was taken up at `at`. The rest of the arguments: see StepRecord.place.

        Returns its record, finished but for result_s and num_committed; None: no such plan was made.
        """
        record = self._in_flight.pop(step, None)
        if record is None:
            return None
        record.returned_at = at
        record.place(started_at, timings_us)
        self._number += 1
        record.number = self._number
        self._finished.append(record)
        return record

    def lost(self) -> list[StepRecord]:
        """The worker is gone, and with it what was in flight: those steps, which are forgotten."""
        void = list(self._in_flight.values())
        self._in_flight.clear()
        return void

    def since(self, number: int) -> list[StepRecord]:
        """Finished steps behind `number`, oldest first, as far as they are kept."""
        if number > self._number:
            number = 0  # of another scheduler's life
        new = min(self._number - number, len(self._finished))
        return list(islice(self._finished, len(self._finished) - new, None))

    def after(self, number: int, started: float) -> bytes:
        """The same as int32 rows of STEP_COLUMNS. started: when time 0 was."""
        rows = [_row(record, started) for record in self.since(number)]
        return b"".join(pack(np.minimum(row, np.iinfo(np.int32).max)) for row in rows)


def _row(record: StepRecord, started: float) -> NDArray[np.int64]:
    values = {
        "number": record.number,
        "epoch": record.epoch,
        "step": record.step,
        "finished_ms": (record.returned_at - started) * 1e3,
        "round_us": (record.returned_at - record.planned_at) * 1e6,
        "rows": record.num_sampling,
        "tokens": record.num_tokens,
        "plan_bytes": record.plan_bytes,
        "encode_us": record.encode_s * 1e6,
        "apply_us": record.apply_s * 1e6,
        "commit_us": record.commit_s * 1e6,
        "forward_us": record.forward_s * 1e6,
        "sample_us": record.sample_s * 1e6,
        "idle_us": record.idle_s * 1e6,
        "schedule_us": record.schedule_s * 1e6,
        "wire_us": record.wire_s * 1e6,
        "return_us": record.return_s * 1e6,
        "result_us": record.result_s * 1e6,
    }
    return np.array([round(values[column]) for column in STEP_COLUMNS], dtype=np.int64)
