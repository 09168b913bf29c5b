"""What a backend offers if it writes K and V on the way from rotating them. Knows no implementation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.backend import AttentionBackend


class RotateAndWriteKV(Protocol):
    """Head norms, rotation and cache write in one pass."""

    def __call__(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Norm (if given weights, float32 [D] each) and rotation of Q, in place, and of K; K and V into their slots.

        qkv: dtype [T, (num_heads + 2 num_kv_heads) * D], Q, K and V of a token one after the other; K and V in it stay
        as they were. positions: int64 [T]; table: float32 [num_positions, D], D/2 cosines, then D/2 sines; the rest as
        for `AttentionBackend.write_kv`.
        """
        ...


def rotate_and_write_kv_of(backend: AttentionBackend) -> RotateAndWriteKV | None:
    """None: the backend only writes what has been rotated before."""
    found: RotateAndWriteKV | None = getattr(backend, "rotate_and_write_kv", None)
    return found
