"""What the kernels of one step are told about the batch, for one cache group. Knows no request and no model.

A step holds `num_tokens` query tokens of `num_seqs` sequences, packed one after the other. Sequence s has the
tokens query_start_loc[s] .. query_start_loc[s+1]-1, and they are the *last* of its seq_lens[s] tokens. So the
i-th of its q query tokens stands at position seq_lens[s] - q + i. Prefill, chunks of prefill and decode differ in
nothing but q. The names are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One per cache group and step; all tensors on the device of the caches."""

    query_start_loc: Tensor  # int32 [num_seqs + 1], ascending, starts at 0
    seq_lens: Tensor  # int32 [num_seqs], tokens visible, those of this step included; 0 = padding
    block_table: Tensor  # int32 [num_seqs, max_blocks], kernel block ids; 0 where there is none
    slot_mapping: Tensor  # int64 [num_tokens], block_id * block_size + offset; -1 = write nothing
    max_query_len: int
    max_seq_len: int
    num_seqs: int
    num_tokens: int
    host_query_start_loc: Tensor | None = None  # the first two again, in host memory, for who plans work there;
    host_seq_lens: Tensor | None = None  # None: read them back from the device

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        seq_lens: list[int],
        block_table: list[list[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Metadata from Python lists, with the slots of the new tokens worked out. For tests and warm-up.

        A worker that runs every step fills the tensors from its own buffers instead.
        """
        num_seqs = len(query_lens)
        width = max([len(row) for row in block_table], default=0) or 1
        table = torch.zeros((num_seqs, width), dtype=torch.int32)
        for row, ids in enumerate(block_table):
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        slots = [
            block_table[s][p // block_size] * block_size + p % block_size
            for s in range(num_seqs)
            for p in range(seq_lens[s] - query_lens[s], seq_lens[s])
        ]
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(torch.tensor(query_lens, dtype=torch.int64), 0)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        return cls(
            query_start_loc=starts.to(device),
            seq_lens=lengths.to(device),
            block_table=table.to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            num_seqs=num_seqs,
            num_tokens=sum(query_lens),
            host_query_start_loc=starts,
            host_seq_lens=lengths,
        )
