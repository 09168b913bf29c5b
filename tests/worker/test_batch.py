"""The worker's batch: what a plan does to it, what of a plan it refuses, and that a reused row remembers nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocol.arrays import pack
from protocol.digest import TableDigest
from protocol.messages import NewRequestData, SamplingParams, SchedulerOutput
from worker.batch import DigestMismatch, InputBatch, PlanError

ROWS = 4


def admit(
    row: int = 0, tokens: list[int] | None = None, blocks: list[int] | None = None, **more: Any
) -> NewRequestData:
    fields: dict[str, Any] = {
        "row": row,
        "token_ids": pack(tokens or [5, 6, 7]),
        "prompt_len": 3,
        "num_computed_tokens": 0,
        "block_ids": (pack(blocks or [1]),),
        "sampling": SamplingParams(temperature=0.0),
    }
    return NewRequestData(**{**fields, **more})


def plan(step: int = 0, digest: int = 0, **more: Any) -> SchedulerOutput:
    fields: dict[str, Any] = {
        "epoch": 0,
        "step": step,
        "finish_rows": b"",
        "admit": (),
        "grow_rows": b"",
        "grow_counts": b"",
        "grow_ids": (b"",),
        "digest": digest,
        "copy_src": b"",
        "copy_dst": b"",
        "prefill_rows": b"",
        "prefill_num_tokens": b"",
        "hold_rows": b"",
    }
    return SchedulerOutput(**{**fields, **more})


def digest_of(entries: list[tuple[int, int, int]], computed: list[int]) -> int:
    """entries: (row, index, id) of the one group."""
    digest = TableDigest(ROWS)
    for row, index, block_id in entries:
        digest.add(np.array([row]), 0, np.array([index]), np.array([block_id]))
    return digest.value(np.array(computed, dtype=np.int64))


def batch_of(*windows: int) -> InputBatch:
    return InputBatch(ROWS, 32, windows or (0,), block_size=4)


def first_plan() -> SchedulerOutput:
    return plan(
        admit=(admit(),),
        prefill_rows=pack([0]),
        prefill_num_tokens=pack([3]),
        digest=digest_of([(0, 0, 1)], [3, 0, 0, 0]),
    )


def test_a_prompt_then_a_token_a_step() -> None:
    batch = batch_of()
    inputs = batch.apply(first_plan())
    assert inputs.rows.tolist() == [0] and inputs.sampling.tolist() == [0]
    assert inputs.input_ids.tolist() == [5, 6, 7] and inputs.positions.tolist() == [0, 1, 2]
    assert inputs.query_start_loc.tolist() == [0, 3] and inputs.seq_lens.tolist() == [3]
    assert inputs.slot_mapping[0].tolist() == [4, 5, 6]
    batch.append_sampled(inputs.rows, np.array([9], dtype=np.int32))
    inputs = batch.apply(plan(1, digest_of([(0, 0, 1)], [4, 0, 0, 0])))
    assert inputs.input_ids.tolist() == [9] and inputs.slot_mapping[0].tolist() == [7]
    batch.append_sampled(inputs.rows, np.array([8], dtype=np.int32))
    grown = plan(2, digest_of([(0, 0, 1), (0, 1, 3)], [5, 0, 0, 0]), grow_rows=pack([0]), grow_ids=(pack([3]),))
    inputs = batch.apply(grown)
    assert inputs.input_ids.tolist() == [8] and inputs.slot_mapping[0].tolist() == [12]


def test_a_plan_that_says_nothing_runs_as_one_that_says_one_token_for_each_row() -> None:
    """Rows come and go between the steps, and one of them is still within its prompt."""
    said, unsaid = batch_of(), batch_of()
    entries = [(0, 0, 1), (2, 0, 2)]
    admitted = (admit(), admit(2, [1, 2, 3, 4], [2], prompt_len=4, num_computed_tokens=1))
    first = plan(
        admit=admitted,
        prefill_rows=pack([0]),
        prefill_num_tokens=pack([3]),
        digest=digest_of(entries, [3, 0, 2, 0]),
    )
    for batch in (said, unsaid):
        inputs = batch.apply(first)
        assert inputs.rows.tolist() == [0, 2] and inputs.sampling.tolist() == [0]
        batch.append_sampled(inputs.rows[inputs.sampling], np.array([9], dtype=np.int32))
    third = digest_of([(1, 0, 3), (2, 0, 2)], [0, 3, 4, 0])
    steps: list[dict[str, Any]] = [
        {"step": 1, "digest": digest_of(entries, [4, 0, 3, 0])},
        {"step": 2, "digest": third, "finish_rows": pack([0]), "admit": (admit(1, blocks=[3], num_computed_tokens=2),)},
    ]
    expected = [([0, 2], [9, 3], [0]), ([1, 2], [7, 4], [0, 1])]
    for fields, (rows, ids, sampling) in zip(steps, expected, strict=True):
        named = {"prefill_rows": pack(rows), "prefill_num_tokens": pack([1] * len(rows))}
        pair = said.apply(plan(**fields, **named)), unsaid.apply(plan(**fields))
        for left, right in zip(*pair, strict=True):
            np.testing.assert_array_equal(left, right)
        assert (pair[1].rows.tolist(), pair[1].input_ids.tolist(), pair[1].sampling.tolist()) == (rows, ids, sampling)
        assert pair[1].query_start_loc.tolist() == [0, 1, 2] and pair[1].query_start_loc.dtype == np.int32
        for batch in (said, unsaid):
            batch.append_sampled(pair[1].rows[sampling], np.full(len(sampling), 8, dtype=np.int32))
    with pytest.raises(PlanError, match="more tokens than it knows"):
        unsaid.num_tokens[1] -= 1
        unsaid.apply(plan(3))


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    batch = batch_of()
    inputs = batch.apply(
        plan(
            admit=(admit(),),
            prefill_rows=pack([0]),
            prefill_num_tokens=pack([2]),
            digest=digest_of([(0, 0, 1)], [2, 0, 0, 0]),
        )
    )
    assert inputs.input_ids.tolist() == [5, 6] and inputs.sampling.tolist() == []


def test_a_row_is_given_away_in_the_plan_that_ends_it_and_remembers_nothing() -> None:
    batch = batch_of()
    first = SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.2, seed=99)
    inputs = batch.apply(
        plan(
            admit=(admit(tokens=[1, 2, 3, 4, 5, 6], blocks=[1, 2], sampling=first),),
            prefill_rows=pack([0]),
            prefill_num_tokens=pack([6]),
            digest=digest_of([(0, 0, 1), (0, 1, 2)], [6, 0, 0, 0]),
        )
    )
    batch.append_sampled(inputs.rows, np.array([9], dtype=np.int32))
    inputs = batch.apply(
        plan(
            1,
            finish_rows=pack([0]),
            admit=(admit(tokens=[7, 8], blocks=[3], prompt_len=2, sampling=SamplingParams(temperature=0.0)),),
            prefill_rows=pack([0]),
            prefill_num_tokens=pack([2]),
            digest=digest_of([(0, 0, 3)], [2, 0, 0, 0]),
        )
    )
    assert inputs.input_ids.tolist() == [7, 8] and inputs.slot_mapping[0].tolist() == [12, 13]
    assert batch.tables[0].cpu[0].tolist() == [3] + [0] * 7
    assert (batch.temperature[0], batch.top_k[0], batch.top_p[0], batch.min_p[0], batch.seed[0]) == (0, 0, 1, 0, 0)
    assert (batch.num_tokens[0], batch.prompt_len[0]) == (2, 2)


def test_a_wrong_digest_is_refused_before_anything_runs() -> None:
    batch = batch_of()
    with pytest.raises(DigestMismatch) as raised:
        batch.apply(plan(admit=(admit(),), prefill_rows=pack([0]), prefill_num_tokens=pack([3]), digest=1))
    assert raised.value.expected == 1
    assert raised.value.actual == digest_of([(0, 0, 1)], [3, 0, 0, 0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 2}, "plan is epoch 0 step 2, expected 0 step 1"),
        ({"epoch": 1}, "plan is epoch 1 step 1, expected 0 step 1"),
        ({"finish_rows": pack([3])}, "row 3 is not in use"),
        ({"finish_rows": pack([99])}, "malformed plan"),
        ({"finish_rows": b"123"}, "finish_rows: 3 bytes are no int32 array"),
        ({"admit": (admit(row=0),)}, "row 0 is in use"),
        ({"admit": (admit(row=ROWS),)}, "row 4 is in use or does not exist"),
        ({"admit": (admit(row=1, num_computed_tokens=3),)}, "3 of 3 tokens computed"),
        ({"admit": (admit(row=1, block_ids=()),)}, "0 block tables for 1 cache groups"),
        ({"admit": (admit(row=1, tokens=[1] * 33),)}, "malformed plan"),
        ({"grow_rows": pack([2]), "grow_ids": (pack([9]),)}, "not in use grows"),
        ({"grow_rows": pack([0]), "grow_ids": (pack([9, 8]),)}, "2 block ids for 1 blocks"),
        ({"grow_rows": pack([0]), "grow_ids": ()}, "0 groups"),
        ({"grow_rows": pack([0]), "grow_counts": pack([9]), "grow_ids": (pack([9] * 9),)}, "at most 8 fit"),
        ({"prefill_rows": pack([2]), "prefill_num_tokens": pack([1])}, "not in use runs"),
        ({"prefill_rows": pack([0]), "prefill_num_tokens": pack([-1])}, "count is negative"),
        ({"prefill_rows": pack([0]), "prefill_num_tokens": pack([2])}, "more tokens than it knows"),
        ({"prefill_rows": pack([0]), "prefill_num_tokens": pack([2, 2])}, "malformed plan"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    batch = batch_of()
    inputs = batch.apply(first_plan())
    batch.append_sampled(inputs.rows, np.array([9], dtype=np.int32))
    with pytest.raises(PlanError, match=reason):
        batch.apply(plan(**{"step": 1, **changes}))


def test_a_new_epoch_starts_from_nothing() -> None:
    batch = batch_of()
    batch.apply(first_plan())
    batch.start_epoch(1)
    assert not batch.active.any() and batch.digest.value(batch.num_computed) == 0
    assert not batch.tables[0].cpu.any()
    fields = {name: getattr(first_plan(), name) for name in SchedulerOutput.__struct_fields__}
    inputs = batch.apply(SchedulerOutput(**{**fields, "epoch": 1}))
    assert inputs.input_ids.tolist() == [5, 6, 7]


def test_a_row_advances_by_a_token_that_only_the_device_knows() -> None:
    batch = batch_of()
    inputs = batch.apply(first_plan())
    batch.expect_sampled(inputs.rows)
    inputs = batch.apply(plan(1, digest_of([(0, 0, 1)], [4, 0, 0, 0])))
    assert inputs.input_ids.tolist() == [-1] and inputs.positions.tolist() == [3] and inputs.sampling.tolist() == [0]
