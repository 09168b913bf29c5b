"""The requests of a trace, as prompts of random tokens that share what the trace says. Knows no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from bench.trace import TraceRow
from bench.workload import Request, Workload

QUICK_ROWS, QUICK_INPUT_LEN, QUICK_OUTPUT_LEN, QUICK_SPAN_S = 12, 64, 12, 4.0


@dataclass(frozen=True)
class TraceWorkload(Workload):
    """Each row is a request, `arrival_s` / `scale` seconds after the round began."""

    kind: ClassVar[str] = "trace"

    trace: str = ""  # name of the file, without its folder
    form: str = ""  # see bench/trace.py
    rows: tuple[TraceRow, ...] = ()
    left_out: int = 0  # rows of the trace that were too long
    scale: float = 1.0  # speed: 2 is twice as fast as recorded
    block_size: int = 512  # tokens that one id of a row stands for

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rows:
            raise ValueError(f"of the trace {self.trace} no row is left ({self.left_out} are too long)")
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale is {self.scale}; it must be a positive number")
        self._at_least(1, "block_size")

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return max(row.arrival_s for row in self.rows) / self.scale

    def as_json(self) -> dict[str, Any]:
        """Its fields, and what the rows are like instead of the rows."""
        form = super().as_json()
        del form["rows"]
        return form | {
            "num_prompts": len(self.rows),
            "mean_input_len": fmean(row.input_len for row in self.rows),
            "mean_output_len": fmean(row.output_len for row in self.rows),
            "span_s": self.span_s,
        }

    def requests(self, round_index: int) -> list[Request]:
        blocks: dict[int, list[int]] = {}  # id -> its tokens in this round

        def block(number: int) -> list[int]:
            if number not in blocks:
                blocks[number] = self._draw(np.random.default_rng([self.seed, round_index, 6, number]), self.block_size)
            return blocks[number]

        rng = np.random.default_rng([self.seed, round_index, 5])
        requests = []
        for i, row in enumerate(self.rows):
            shared = [token for number in row.block_ids for token in block(number)][: row.input_len]
            prompt = shared + self._draw(rng, row.input_len - len(shared))
            requests.append(Request(i, tuple(prompt), row.output_len, arrival_s=row.arrival_s / self.scale))
        return requests


def choose_rows(rows: Sequence[TraceRow], max_len: int | None, count: int | None) -> tuple[tuple[TraceRow, ...], int]:
    """The first `count` rows whose prompt and answer are at most `max_len` tokens together, and how many were not.

    The first of them arrives at 0.
    """
    kept: list[TraceRow] = []
    left_out = 0
    for row in rows:
        if count is not None and len(kept) == count:
            break
        if max_len is not None and row.input_len + row.output_len > max_len:
            left_out += 1
        else:
            kept.append(row)
    start = kept[0].arrival_s if kept else 0.0
    return tuple(TraceRow(r.arrival_s - start, r.input_len, r.output_len, r.block_ids) for r in kept), left_out


def cut_for_quick(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    """A look at whether a trace works: its first rows, cut short, arriving within a few seconds."""
    rows = rows[:QUICK_ROWS]
    span = max((row.arrival_s for row in rows), default=0.0)
    faster = max(1.0, span / QUICK_SPAN_S)
    return tuple(
        TraceRow(
            row.arrival_s / faster,
            min(row.input_len, QUICK_INPUT_LEN),
            min(row.output_len, QUICK_OUTPUT_LEN),
            row.block_ids,
        )
        for row in rows
    )
