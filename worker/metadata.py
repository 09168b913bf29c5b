"""From a packed step to what the attention backend is told: one AttentionMetadata per cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from worker.batch import StepInputs
from worker.device_table import DeviceTable


def build_metadata(step: StepInputs, tables: list[DeviceTable], device: torch.device) -> list[AttentionMetadata]:
    """Per cache group; positions and lengths are shared, block tables and slots are the group's own."""
    return metadata_of(
        tables,
        rows=torch.from_numpy(step.rows).to(device),
        query_start_loc=torch.from_numpy(step.query_start_loc).to(device),
        seq_lens=torch.from_numpy(step.seq_lens).to(device),
        slot_mapping=[torch.from_numpy(slots).to(device) for slots in step.slot_mapping],
        max_query_len=int(np.diff(step.query_start_loc).max()),
        max_seq_len=int(step.seq_lens.max()),
        host_query_start_loc=torch.from_numpy(step.query_start_loc),
        host_seq_lens=torch.from_numpy(step.seq_lens),
    )


def metadata_of(
    tables: list[DeviceTable],
    *,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Sequence[Tensor],
    max_query_len: int,
    max_seq_len: int,
    host_query_start_loc: Tensor | None = None,
    host_seq_lens: Tensor | None = None,
) -> list[AttentionMetadata]:
    """The same from tensors that are on the device already; the block tables are gathered there, by row.

    rows: int64 [S]; slot_mapping: int64 [T] per cache group; the others as in AttentionMetadata.
    """
    return [
        AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=table.tensor[:, : -(-max_seq_len // table.table.block_size)].index_select(0, rows),
            slot_mapping=slots,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_seqs=rows.shape[0],
            num_tokens=slots.shape[0],
            host_query_start_loc=host_query_start_loc,
            host_seq_lens=host_seq_lens,
        )
        for table, slots in zip(tables, slot_mapping, strict=True)
    ]
