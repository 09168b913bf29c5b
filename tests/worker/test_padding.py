"""The sizes at which decode is recorded, and a step brought to one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batch import StepInputs
from worker.padding import graph_sizes, no_rows, pad_decode


@given(st.integers(1, 2000))
def test_every_batch_has_a_size_with_little_padding(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        assert size - smaller - 1 <= max(7, size // 8)
    assert len(sizes) <= 11 + 8 * max(0, max_num_seqs.bit_length() - 6)


def decode_step(num_rows: int) -> StepInputs:
    numbers = np.arange(num_rows)
    return StepInputs(
        rows=numbers * 2,
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=(numbers + 5).astype(np.int32),
        input_ids=(numbers + 100).astype(np.int32),
        positions=numbers + 4,
        slot_mapping=(numbers + 40, numbers + 80),
        sampling=numbers,
        copy_src=np.zeros(0, np.int32),
        copy_dst=np.zeros(0, np.int32),
    )


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_padding_rows_have_no_token_see_nothing_and_write_nowhere(num_rows: int) -> None:
    step = decode_step(num_rows)
    padded = pad_decode(step, 4)
    more = 4 - num_rows
    for name in ("rows", "seq_lens", "input_ids", "positions"):
        before, after = getattr(step, name), getattr(padded, name)
        assert after.dtype == before.dtype and after[:num_rows].tolist() == before.tolist()
        assert after[num_rows:].tolist() == [0] * more
    assert padded.query_start_loc.tolist() == [*range(num_rows + 1), *[num_rows] * more]
    assert [slots[num_rows:].tolist() for slots in padded.slot_mapping] == [[-1] * more] * 2
    assert padded.sampling.tolist() == step.sampling.tolist()


def test_a_step_that_is_larger_or_no_decode_is_not_padded() -> None:
    with pytest.raises(AssertionError, match="no decode step of this size"):
        pad_decode(decode_step(5), 4)
    prefill = decode_step(2)._replace(input_ids=np.zeros(7, np.int32))
    with pytest.raises(AssertionError, match="no decode step of this size"):
        pad_decode(prefill, 4)


def test_a_step_is_recorded_with_rows_of_padding_only() -> None:
    padded = pad_decode(no_rows(2), 3)
    assert padded.query_start_loc.tolist() == [0] * 4 and padded.seq_lens.tolist() == [0] * 3
    assert [slots.tolist() for slots in padded.slot_mapping] == [[-1] * 3] * 2
