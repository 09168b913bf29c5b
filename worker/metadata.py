"""From a packed step to what the attention backend is told: one AttentionMetadata per cache group."""

from __future__ import annotations

import numpy as np
import torch

from kernels.metadata import AttentionMetadata
from worker.batch import StepInputs
from worker.device_table import DeviceTable


def build_metadata(step: StepInputs, tables: list[DeviceTable], device: torch.device) -> list[AttentionMetadata]:
    """Per cache group; positions and lengths are shared, block tables and slots are the group's own."""
    host_query_start_loc, host_seq_lens = torch.from_numpy(step.query_start_loc), torch.from_numpy(step.seq_lens)
    query_start_loc, seq_lens = host_query_start_loc.to(device), host_seq_lens.to(device)
    max_seq_len = int(step.seq_lens.max())
    max_query_len = int(np.diff(step.query_start_loc).max())
    rows = torch.from_numpy(step.rows).to(device)
    built = []
    for table, slots in zip(tables, step.slot_mapping, strict=True):
        width = -(-max_seq_len // table.table.block_size)
        built.append(
            AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table.tensor[:, :width].index_select(0, rows),
                slot_mapping=torch.from_numpy(slots).to(device),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                num_seqs=len(step.rows),
                num_tokens=len(step.input_ids),
                host_query_start_loc=host_query_start_loc,
                host_seq_lens=host_seq_lens,
            )
        )
    return built
