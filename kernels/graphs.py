"""What a backend offers if its decode steps can be recorded once and replayed (CUDA graphs). Knows no implementation.

A replayed step launches the same kernels with the same grid over the same addresses; only what lies there changes. So
whatever a backend plans on the host for a step must be words in one buffer of a fixed size, filled up with work that
does nothing. A backend without `plan_decode` is never recorded.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.metadata import AttentionMetadata


class DecodePlan(Protocol):
    """The work of decode steps of up to `max_seqs` sequences with one query token each, for one cache group."""

    num_words: int
    """int32 words that the plan of a step takes, whatever the step; a multiple of 4."""

    def pack(self, seq_lens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """The plan for these lengths (int32 [n], n <= max_seqs, 0 = padding), int32 [num_words].

        None if there is more work than the plan has room for: then the step must be run without a graph.
        """
        ...

    def bind(self, metadata: AttentionMetadata, words: Tensor) -> None:
        """From now on attention under `metadata` takes its work from words (int32 [num_words], 16-byte aligned, on the
        device) instead of planning it."""
        ...


@runtime_checkable
class GraphBackend(Protocol):
    """An attention backend whose decode steps can be recorded."""

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
    ) -> DecodePlan:
        """The plan of a shape. max_seq_len: tokens, of the longest sequence that can come; kv_bytes: an element of the
        cache."""
        ...
