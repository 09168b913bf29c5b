"""The last finished steps of one replica, for whoever looks. Kept as they came; turned into numbers only when asked."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import INT32, pack
from protocol.messages import STEP_COLUMNS

if TYPE_CHECKING:
    from scheduler.replica import Step

KEPT_STEPS = 256
_TIMINGS = 5
"""Leading elements of ModelRunnerOutput.timings_us: apply, commit, forward, sample, idle."""


class _Record(NamedTuple):
    number: int
    epoch: int
    step: Step
    finished_at: float
    encoded: tuple[int, float]
    """Bytes of the plan's frame, seconds it took to make it."""
    timings_us: bytes


class StepLog:
    """Survives epochs: the numbers of its records go on."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque(maxlen=KEPT_STEPS)
        self._encoded: dict[int, tuple[int, float]] = {}
        """By step: of plans whose result has not come; as few as steps are in flight."""
        self._number = 0

    def encoded(self, step: int, num_bytes: int, seconds: float) -> None:
        """The plan of `step` became a frame of so many bytes."""
        if step == 0:
            self._encoded.clear()  # a new epoch: what its predecessor had in flight is void
        self._encoded[step] = (num_bytes, seconds)

    def finished(self, epoch: int, step: Step, timings_us: bytes, now: float) -> None:
        """The result of `step` counts."""
        self._number += 1
        encoded = self._encoded.pop(step.step, (0, 0.0))
        self._records.append(_Record(self._number, epoch, step, now, encoded, timings_us))

    def after(self, number: int, started: float) -> bytes:
        """Records behind `number` as int32 rows of STEP_COLUMNS, oldest first. started: when time 0 was."""
        if number > self._number:
            number = 0  # of another scheduler's life
        new = min(self._number - number, len(self._records))
        rows = [_row(self._records[place], started) for place in range(len(self._records) - new, len(self._records))]
        return b"".join(pack(np.minimum(row, np.iinfo(np.int32).max)) for row in rows)


def _row(record: _Record, started: float) -> NDArray[np.int64]:
    step, (num_bytes, encode_s) = record.step, record.encoded
    row = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
    row[:9] = (
        record.number,
        record.epoch,
        step.step,
        (record.finished_at - started) * 1e3,
        (record.finished_at - step.sent_at) * 1e6,
        len(step.rows),
        step.num_tokens,
        num_bytes,
        encode_s * 1e6,
    )
    known = min(_TIMINGS, len(record.timings_us) // 4)
    row[9 : 9 + known] = np.frombuffer(record.timings_us, dtype=INT32, count=known)
    return row
