"""Decode steps brought to a few fixed sizes, since a recorded step runs at the size it was recorded at. Pure numpy.

A row of padding has no query token (query_start_loc repeats its last value), sees nothing (seq_len 0) and writes
nowhere (slot -1). Its place in the flat arrays holds token 0 at position 0; what the model makes of that is nobody's.
Where the device makes slots, the step has none, and the kernel gives padding the same.
"""

from __future__ import annotations

import numpy as np

from worker.batch import StepInputs


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending, max_num_seqs the last. Padding is at most 7 rows up to 64 sequences and under an eighth beyond."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 1) >> 3)
    return [*sizes, max_num_seqs]


def pad_decode(step: StepInputs, size: int) -> StepInputs:
    """A decode step of S <= size rows as one of `size` rows. `sampling` still names the rows that sample."""
    assert len(step.input_ids) == len(step.rows) <= size, "no decode step of this size"
    more = size - len(step.rows)

    def fill(values: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate([values, np.full(more, value, dtype=values.dtype)])

    return step._replace(
        rows=fill(step.rows, 0),
        query_start_loc=fill(step.query_start_loc, int(step.query_start_loc[-1])),
        seq_lens=fill(step.seq_lens, 0),
        input_ids=fill(step.input_ids, 0),
        positions=fill(step.positions, 0),
        slot_mapping=tuple(fill(slots, -1) for slots in step.slot_mapping),
    )


def no_rows(num_groups: int) -> StepInputs:
    """A decode step without rows. Padded, it is what a step is recorded with. num_groups: those it has slots of."""
    none64, none32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return StepInputs(
        rows=none64,
        query_start_loc=np.zeros(1, np.int32),
        seq_lens=none32,
        input_ids=none32,
        positions=none64,
        slot_mapping=(none64,) * num_groups,
        sampling=none64,
        copy_src=none32,
        copy_dst=none32,
    )
