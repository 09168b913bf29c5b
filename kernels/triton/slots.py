"""Where the K and V of each token of a step go: the slots of all cache groups, in one launch, on the device.

    mapper = SlotMapper(tables, block_sizes)          # once: block tables int32 [num_rows, max_blocks], one per group
    mapper(rows, query_start_loc, seq_lens, slots)    # every step: fills slots int64 [num_groups, n]
    mapper(rows, query_start_loc, seq_lens, slots, positions)   # and positions int64 [n] along the way

Tokens are packed as in `kernels.metadata`: token t of sequence s stands at position
seq_lens[s] - (query_start_loc[s + 1] - t), and sequence s lives in row rows[s] of every table.
slot = table[row, position // B] · B + position mod B.

The batch may be padded for a CUDA graph: tokens behind query_start_loc[-1], and those of sequences with row < 0 or
length 0, get slot -1 (nothing is written) and position 0. Slot -1 also where a position has no block: the null block is
never written. Nothing is read back, and the addresses of the tables are taken once, so a mapper may be captured in a
graph; the tables must not be moved after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.dispatch import can_run, check_same_device

_FIELDS = 4  # of a group: address of its table, entries from row to row, blocks in a row, tokens in a block
_GROUP_FIELDS = tl.constexpr(_FIELDS)
TOKENS = 128


@triton.jit(
    do_not_specialize=["num_seqs", "num_slots", "steps", "stride_slots"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_ptr", "seq_len_ptr", "slots_ptr", "positions_ptr"],
)
def slot_mapping_kernel(
    groups_ptr, rows_ptr, query_start_ptr, seq_len_ptr, slots_ptr, positions_ptr,
    num_seqs, num_slots, steps, stride_slots,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK tokens, group). `steps` halvings find the sequence of a token among num_seqs."""
    group = groups_ptr + tl.program_id(1) * _GROUP_FIELDS
    table = tl.load(group).to(tl.pointer_type(tl.int32))
    stride_row, width, size = tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tl.load(query_start_ptr + num_seqs)
    # the last sequence that begins at or before the token: query_start[low] <= token < query_start[high]
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high) // 2
        begun = tl.load(query_start_ptr + middle, mask=live, other=0) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    row = tl.load(rows_ptr + low, mask=live, other=-1).to(tl.int64)
    end = tl.load(query_start_ptr + low + 1, mask=live, other=0)
    position = (tl.load(seq_len_ptr + low, mask=live, other=0) - end + token).to(tl.int64)
    live = live & (row >= 0) & (position >= 0)
    position = tl.where(live, position, 0)
    column = position // size
    block = tl.load(table + row * stride_row + column, mask=live & (column < width), other=0).to(tl.int64)
    slot = tl.where(block > 0, block * size + position % size, -1)
    inside = token < num_slots
    tl.store(slots_ptr + tl.program_id(1).to(tl.int64) * stride_slots + token, slot, mask=inside)
    if POSITIONS:  # the same in every group: one of them writes
        tl.store(positions_ptr + token, position, mask=inside & (tl.program_id(1) == 0))


class SlotMapper:
    """The block tables of all cache groups. tables: int32 [num_rows, max_blocks], rows may be strided.

    block_sizes: tokens of a (kernel) block, per group. Raises ValueError for tables of another form.
    """

    def __init__(self, tables: Sequence[Tensor], block_sizes: Sequence[int]) -> None:
        if not tables or len(tables) != len(block_sizes):
            raise ValueError(f"{len(tables)} block tables and {len(block_sizes)} block sizes: one of each per group")
        for index, (table, size) in enumerate(zip(tables, block_sizes, strict=True)):
            if table.dtype is not torch.int32 or table.dim() != 2 or table.stride(1) != 1:
                raise ValueError(
                    f"block table {index} must be int32 [num_rows, max_blocks] with contiguous rows, "
                    f"not {table.dtype} {tuple(table.shape)} with strides {table.stride()}"
                )
            if size < 1:
                raise ValueError(f"block size {size} of group {index} must be positive")
        check_same_device(**{f"table {index}": table for index, table in enumerate(tables)})
        self.tables = list(tables)  # also keeps their memory alive
        self.block_sizes = list(block_sizes)
        self._groups = torch.tensor(
            [
                [table.data_ptr(), table.stride(0), table.shape[1], size]
                for table, size in zip(tables, block_sizes, strict=True)
            ],
            dtype=torch.int64,
            device=tables[0].device,
        )

    def __call__(
        self, rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Fill slots int64 [num_groups, n], and positions int64 [n] if given. n may exceed the number of tokens.

        rows: int32 or int64 [num_seqs]; query_start_loc: int32 [num_seqs + 1]; seq_lens: int32 [num_seqs].
        """
        num_seqs, num_slots = rows.shape[0], slots.shape[-1]
        self._check(rows, query_start_loc, seq_lens, slots, positions)
        if not num_slots:
            return
        if not num_seqs:
            slots.fill_(-1)
            if positions is not None:
                positions.zero_()
        elif can_run(slot_mapping_kernel, slots):
            slot_mapping_kernel[(triton.cdiv(num_slots, TOKENS), len(self.tables))](
                self._groups, rows, query_start_loc, seq_lens, slots, positions,
                num_seqs, num_slots, num_seqs.bit_length(), slots.stride(0),
                POSITIONS=positions is not None, BLOCK=TOKENS,
            )  # fmt: skip
        else:
            self._with_torch(rows, query_start_loc, seq_lens, slots, positions)

    def _with_torch(
        self, rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slots: Tensor, positions: Tensor | None
    ) -> None:
        num_seqs = rows.shape[0]
        token = torch.arange(slots.shape[1], dtype=torch.int32, device=slots.device)
        starts = query_start_loc[: num_seqs + 1]
        seq = torch.searchsorted(starts, token, right=True) - 1
        live = seq < num_seqs
        seq = seq.clamp(max=num_seqs - 1)
        row = rows.long()[seq]
        position = (seq_lens[seq] - starts[seq + 1] + token).long()
        live &= (row >= 0) & (position >= 0)
        position = torch.where(live, position, 0)
        for group, (table, size) in enumerate(zip(self.tables, self.block_sizes, strict=True)):
            column = position // size
            found = live & (column < table.shape[1])
            block = table[torch.where(found, row, 0), torch.where(found, column, 0)].long()
            slots[group] = torch.where(found & (block > 0), block * size + position % size, -1)
        if positions is not None:
            positions.copy_(position)

    def _check(
        self, rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slots: Tensor, positions: Tensor | None
    ) -> None:
        num_seqs = rows.shape[0]
        if rows.dtype not in (torch.int32, torch.int64) or rows.dim() != 1 or rows.stride(0) != 1:
            raise ValueError(f"rows must be contiguous int32 or int64 [num_seqs], not {rows.dtype} {tuple(rows.shape)}")
        for name, tensor, length in (
            ("query_start_loc", query_start_loc, num_seqs + 1),
            ("seq_lens", seq_lens, num_seqs),
        ):
            if (
                tensor.dtype is not torch.int32
                or tensor.dim() != 1
                or tensor.shape[0] < length
                or tensor.stride(0) != 1
            ):
                raise ValueError(
                    f"{name} must be contiguous int32 with {length} entries, not {tensor.dtype} {tuple(tensor.shape)}"
                )
        if (
            slots.dtype is not torch.int64
            or slots.dim() != 2
            or slots.shape[0] != len(self.tables)
            or slots.stride(1) != 1
        ):
            raise ValueError(
                f"slots must be int64 [{len(self.tables)}, n] with contiguous rows, "
                f"not {slots.dtype} {tuple(slots.shape)}"
            )
        if positions is not None and (
            positions.dtype is not torch.int64 or positions.shape != slots.shape[1:] or positions.stride(0) != 1
        ):
            raise ValueError(
                f"positions must be contiguous int64 [{slots.shape[1]}], not {positions.dtype} {tuple(positions.shape)}"
            )
        check_same_device(
            tables=self.tables[0], rows=rows, query_start_loc=query_start_loc, seq_lens=seq_lens, slots=slots,
            positions=positions,
        )  # fmt: skip
