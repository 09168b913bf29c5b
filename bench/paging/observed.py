"""What a server did during a load, from its own step records and from looks at its pool. Pure.

Keys of `Seen`, which stay: a *step* is one plan and its result; a *decode step* computes one token for each of its rows
and no prompt; its *work* is what the worker spends on it (apply, commit, forward, sample).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import STEP_COLUMNS, KernelShare, Profile

ATTENTION = "::paged_attention"
"""How the calls of every backend's attention end in a profile (worker/profiler.py)."""
PREFILL_TOKENS = 128
"""From so many tokens on, a step's time is counted as that of prefill arithmetic."""


@dataclass(frozen=True)
class PoolSample:
    """One look at a replica while it ran. Slots count tokens."""

    running: int  # rows
    effective: int  # slots of tables that hold a token, shared ones once for each table
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True)
class Kernel:
    """Attention in a profile of some steps. us_per_step: of all layers together; share: of the profiled steps' time."""

    steps: int
    us_per_step: float
    share: float

    @classmethod
    def of(cls, profile: Profile) -> Kernel | None:
        """None: no step ran, or attention is not among the listed."""
        calls: list[KernelShare] = [each for each in profile.kernels if each.name.endswith(ATTENTION)]
        if not profile.steps or not calls:
            return None
        total = sum(each.self_us for each in calls)
        return cls(profile.steps, total / profile.steps, total / profile.wall_us)


@dataclass(frozen=True)
class Seen:
    """One run, as its server counted it. None: there was no such step or sample."""

    steps: int
    decode_steps: int
    rows: float | None  # that sampled a token, mean over the steps
    running: float | None  # rows in the batch, mean over the looks
    effective_slots: float | None
    allocated_slots: float | None  # blocks in use times block size: shared ones once
    free_blocks: float | None
    preemptions: int
    hit_rate: float | None  # prompt tokens found in the prefix cache over those looked up
    decode_step_ms: float | None  # work, median
    prefill_us_per_token: float | None  # forward over tokens, median of steps of 128 tokens or more
    decode_plan_bytes: float | None  # mean
    scheduler_step_us: float | None  # schedule, encode and result, median over all steps
    one_row_step_ms: float | None  # work, median of decode steps of a single row


def summarise(
    steps: NDArray[np.int32], samples: Sequence[PoolSample], block_size: int, preemptions: int, queries: int, hits: int
) -> Seen:
    """steps: rows of STEP_COLUMNS. The rest: what the counters grew by."""
    column = {name: steps[:, i].astype(np.int64) for i, name in enumerate(STEP_COLUMNS)}
    rows, tokens, forward = column["rows"], column["tokens"], column["forward_us"]
    work = column["apply_us"] + column["commit_us"] + forward + column["sample_us"]
    decode = (tokens == rows) & (rows > 0)
    prefill = tokens >= PREFILL_TOKENS
    busy = [sample for sample in samples if sample.running]
    return Seen(
        steps=len(steps),
        decode_steps=int(decode.sum()),
        rows=_mean(rows),
        running=_mean([sample.running for sample in busy]),
        effective_slots=_mean([sample.effective for sample in busy]),
        allocated_slots=_mean([(sample.total_blocks - sample.free_blocks) * block_size for sample in busy]),
        free_blocks=_mean([sample.free_blocks for sample in busy]),
        preemptions=preemptions,
        hit_rate=hits / queries if queries else None,
        decode_step_ms=_median(work[decode] / 1e3),
        prefill_us_per_token=_median(forward[prefill] / tokens[prefill]),
        decode_plan_bytes=_mean(column["plan_bytes"][decode]),
        scheduler_step_us=_median(column["schedule_us"] + column["encode_us"] + column["result_us"]),
        one_row_step_ms=_median(work[decode & (rows == 1)] / 1e3),
    )


def _mean(values: Sequence[float] | NDArray[np.int64]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _median(values: NDArray[np.float64] | NDArray[np.int64]) -> float | None:
    return float(np.median(values)) if len(values) else None
