"""slot_mapping: where the KV of each token goes, in every cache group, padding included."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_ops import DEVICE, FORMS, computed_by, slots

from worker.block_table import BlockTable

POISON = 2**30
"""A block id that no table entry in use holds: a slot made of it is far out of any pool."""


def tables_of(seq_lens: list[int], rows: list[int], block_sizes: list[int], seed: int) -> list[torch.Tensor]:
    """Tables of 12 rows; only the blocks of the sequences are real. The rows lie in a wider buffer."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for size in block_sizes:
        longest = max([*seq_lens, 1])
        table = torch.full((12, -(-longest // size) + 3), POISON, dtype=torch.int32, device=DEVICE)[:, :-2]
        for row, length in zip(rows, seq_lens, strict=True):
            count = -(-length // size)
            table[row, :count] = torch.randint(1, 1000, (count,), generator=generator, dtype=torch.int32).to(DEVICE)
        tables.append(table)
    return tables


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=6),
    block_sizes=st.lists(st.sampled_from([1, 3, 16, 48, 64]), min_size=1, max_size=3),
    padding=st.integers(0, 140),
    seed=st.integers(0, 1000),
    wide_rows=st.booleans(),
)
def test_every_token_of_every_group_gets_its_slot_and_padding_gets_none(
    form: str, lengths: list[tuple[int, int]], block_sizes: list[int], padding: int, seed: int, wide_rows: bool
) -> None:
    query_lens, seq_lens = [q for q, _ in lengths], [q + context for q, context in lengths]
    rows = np.random.default_rng(seed).permutation(12)[: len(lengths)].tolist()
    tables = tables_of(seq_lens, rows, block_sizes, seed)
    num_tokens = sum(query_lens)
    buffer = torch.full((len(tables), num_tokens + padding + 5), 7, dtype=torch.int64, device=DEVICE)
    positions = torch.full((num_tokens + padding,), 7, device=DEVICE)
    with computed_by(form, slots) if num_tokens + padding else nullcontext():
        slots.SlotMapper(tables, block_sizes)(
            ints(rows, torch.int64 if wide_rows else torch.int32),
            ints([0, *np.cumsum(query_lens).tolist()]),
            ints(seq_lens),
            buffer[:, : num_tokens + padding],
            positions,
        )
    at = [p for q, n in zip(query_lens, seq_lens, strict=True) for p in range(n - q, n)]
    owners = [row for row, q in zip(rows, query_lens, strict=True) for _ in range(q)]
    for table, size, got in zip(tables, block_sizes, buffer.tolist(), strict=True):
        expected = [int(table[row, p // size]) * size + p % size for row, p in zip(owners, at, strict=True)]
        assert got == expected + [-1] * padding + [7] * 5
    assert positions.tolist() == at + [0] * padding


@pytest.mark.parametrize("form", FORMS)
def test_a_padded_batch_writes_nothing_for_its_padding(form: str) -> None:
    """Padding of a decode graph: rows of -1 or of length 0, with a query each; and a block that is null."""
    table = torch.tensor([[5, 0, 9], [6, 7, 8]], dtype=torch.int32, device=DEVICE)
    out, positions = (
        torch.zeros((1, 5), dtype=torch.int64, device=DEVICE),
        torch.ones(5, dtype=torch.int64, device=DEVICE),
    )
    with computed_by(form, slots):
        slots.SlotMapper([table], [4])(
            ints([1, -1, 0, 0, 0]), ints([0, 1, 2, 3, 4, 5]), ints([6, 3, 0, 7, 12]), out, positions
        )
    assert out.tolist() == [[7 * 4 + 1, -1, -1, -1, 9 * 4 + 3]]
    assert positions.tolist() == [5, 0, 0, 6, 11]


@pytest.mark.parametrize("form", FORMS)
def test_a_position_past_the_table_is_not_looked_up(form: str) -> None:
    table = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE)
    with computed_by(form, slots):
        slots.SlotMapper([table], [4])(ints([0]), ints([0, 1]), ints([9]), out)
    assert out.tolist() == [[-1]]


@pytest.mark.parametrize("form", FORMS)
def test_slots_beyond_32_bits(form: str) -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE)
    with computed_by(form, slots):
        slots.SlotMapper([table], [256])(ints([0]), ints([0, 1]), ints([200]), out)
    assert out.tolist() == [[(2**31 - 1) * 256 + 199]]


def test_no_sequences_at_all() -> None:
    out, positions = (
        torch.zeros((1, 3), dtype=torch.int64, device=DEVICE),
        torch.ones(3, dtype=torch.int64, device=DEVICE),
    )
    mapper = slots.SlotMapper([torch.ones((1, 1), dtype=torch.int32, device=DEVICE)], [4])
    mapper(ints([]), ints([0]), ints([]), out, positions)
    assert out.tolist() == [[-1] * 3] and positions.tolist() == [0] * 3


def test_the_slots_are_those_of_the_workers_own_table() -> None:
    table = BlockTable(4, 5, 8, blocks_per_id=2)
    table.add_row(2, np.array([3, 1, 4], dtype=np.int32))
    table.add_row(0, np.array([2], dtype=np.int32))
    rows, positions = np.array([0] * 3 + [2] * 30), np.array([*range(5, 8), *range(15, 45)])
    out = torch.zeros((1, 33), dtype=torch.int64, device=DEVICE)
    mapper = slots.SlotMapper([torch.from_numpy(table.cpu).to(DEVICE)], [8])
    mapper(ints([0, 2]), ints([0, 3, 33]), ints([8, 45]), out)
    assert out[0].tolist() == table.slots(rows, positions).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ints([0]).float()}, "rows must be contiguous int32 or int64"),
        ({"query_start_loc": ints([0])}, "query_start_loc must be contiguous int32 with 2 entries"),
        ({"seq_lens": ints([1], torch.int64)}, "seq_lens must be contiguous int32 with 1 entries"),
        ({"slots": ints([[0], [0]], torch.int64)}, r"slots must be int64 \[1, n\]"),
        ({"positions": ints([0])}, r"positions must be contiguous int64 \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, torch.Tensor], message: str) -> None:
    good = {
        "rows": ints([0]),
        "query_start_loc": ints([0, 1]),
        "seq_lens": ints([1]),
        "slots": torch.zeros((1, 1), dtype=torch.int64, device=DEVICE),
    }
    with pytest.raises(ValueError, match=message):
        slots.SlotMapper([torch.ones((1, 1), dtype=torch.int32, device=DEVICE)], [4])(**(good | change))


def test_tables_of_another_form_are_refused() -> None:
    table = torch.ones((2, 2), dtype=torch.int32, device=DEVICE)
    for tables, sizes, message in (
        ([], [], "0 block tables"),
        ([table], [4, 4], "1 block tables and 2 block sizes"),
        ([table.long()], [4], "block table 0 must be int32"),
        ([table.T], [4], "contiguous rows"),
        ([table], [0], "block size 0 of group 0"),
    ):
        with pytest.raises(ValueError, match=message):
            slots.SlotMapper(tables, sizes)
