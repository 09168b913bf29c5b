"""The torch backend as one whose decode steps can be recorded: fast enough to play many histories."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.torch_backend import TorchBackend
from tests.kernels.triton_ops import backend as triton


class EchoPlan:
    """A DecodePlan whose words are the lengths themselves, so that attention can see whether they are those of its
    step."""

    def __init__(self, backend: RecordableBackend, max_seqs: int) -> None:
        self.num_words = -(-max_seqs // 4) * 4
        self.backend = backend

    def pack(self, seq_lens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        if int(seq_lens.sum()) > self.backend.room:
            self.backend.refused += 1
            return None
        words = np.zeros(self.num_words, dtype=np.int32)
        words[: len(seq_lens)] = seq_lens
        return words

    def bind(self, metadata: AttentionMetadata, words: Tensor) -> None:
        self.backend.bound = (metadata, words)


class RecordableBackend(TorchBackend):
    """Also a GraphBackend."""

    def __init__(self, room: int = 1 << 30) -> None:
        super().__init__()
        self.room = room
        """Decode steps with more tokens than this in all are too much work."""
        self.refused = 0
        self.bound: tuple[AttentionMetadata, Tensor] | None = None

    def plan_decode(
        self,
        *,
        max_seqs: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int | None,
        kv_bytes: int = 2,
    ) -> EchoPlan:
        return EchoPlan(self, max_seqs)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, **more) -> None:
        if self.bound is not None and self.bound[0] is metadata:
            words = self.bound[1][: metadata.num_seqs]
            assert torch.equal(words, metadata.seq_lens), "the work is another step's"
        super().paged_attention(q, k_cache, v_cache, metadata, **more)


class MappingBackend(RecordableBackend):
    """Also a SlotBackend: the slots are those of the Triton backend, and so is the kernel."""

    slot_mapper = triton.TritonBackend.slot_mapper
