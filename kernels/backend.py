"""What an attention backend must be able to do. Knows no implementation.

K and V of a layer lie in two caches [num_blocks, num_kv_heads, block_size, head_dim]: one (block, head) tile is
contiguous in a cache of its own; one cut out of a bigger pool may have any strides but in head_dim. Slot
b * block_size + o is offset o of block b. Block 0 is the null block: nobody writes it, and what is in it must not
matter. The same holds for every slot that no live token owns: it may hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from kernels.cpu.tape import Tape
    from kernels.cpu.team import Team


class AttentionBackend(Protocol):
    """`counters` says how often each kernel has run: proof of execution, where the registry is proof of existence."""

    name: str
    counters: dict[str, int]

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Put k, v [num_tokens, num_kv_heads, head_dim] at slot_mapping int64 [num_tokens]; -1 writes nothing.

        k and v may be strided views (of a fused qkv buffer); head_dim must be contiguous. A quantised cache
        (`kernels.quantise`) needs k_scale and v_scale, float32 [num_kv_heads]; another takes none.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor,
    ) -> None:
        """Attention of q over the cached keys, into out; both [num_tokens, num_q_heads, head_dim].

        The query at position p sees keys max(0, p - window + 1) .. p: `window` keys, itself included; without a
        window, all of 0 .. p. Not causal, it sees all keys of its sequence, or those less than `window` away. Query
        head h reads KV head h // (num_q_heads // num_kv_heads). With a soft cap c, a scaled score s becomes
        c * tanh(s / c). sinks, float32 [num_q_heads]: a further score of each head, neither scaled nor capped, that
        takes its share of the weight and has no value. A query that sees no key (seq_len 0) gets zeros.
        A backend refuses with ValueError what its entry in the registry does not claim.
        """
        ...

    def copy_blocks(self, caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        """In each cache, blocks dst[i] become copies of src[i] (int64 [n]), as if all at once; dst are distinct."""
        ...

    def warm_up(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        window: int | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
        sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Compile and run everything a worker of this shape can need, so that no step ever waits for a compiler.

        kv_dtype: of the cache, if it is quantised.
        """
        ...


def replay_of(backend: AttentionBackend) -> Callable[[Tape, int], None] | None:
    """Plays the recorded layers of a step (`kernels.cpu.backend.CpuBackend.replay`); None: the backend records none."""
    found: Callable[[Tape, int], None] | None = getattr(backend, "replay", None)
    return found


def team_of(backend: AttentionBackend) -> Team | None:
    """The threads that compute attention, which a model's layers may use too; None: the backend has none."""
    found: Team | None = getattr(backend, "team", None)
    return found
