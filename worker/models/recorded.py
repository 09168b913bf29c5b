"""What a step computes behind its first layer, recorded on a CPU's team and played again. Knows no architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kernels.backend import AttentionBackend

if TYPE_CHECKING:
    from kernels.cpu.tape import Tape
    from kernels.cpu.team import Team


class RecordedLayers(NamedTuple):
    """Good for steps of at most as many tokens, over the same caches, while nobody asked for more of the memory."""

    tape: Tape
    residual: Tensor
    """float32 [T, H]: where the first layer leaves its result."""
    hidden: Tensor
    """activation_dtype [T, H]: where a replay leaves its."""
    kv_caches: Sequence[tuple[Tensor, ...]]
    backend: AttentionBackend

    @classmethod
    def record(
        cls,
        team: Team,
        residual: Tensor,
        kv_caches: Sequence[tuple[Tensor, ...]],
        backend: AttentionBackend,
        forward: Callable[[], Tensor],
    ) -> RecordedLayers:
        """Run forward() → hidden, and remember what it called."""
        with team.recording() as tape:
            hidden = forward()
        return cls(tape, residual, hidden, kv_caches, backend)

    def serves(self, residual: Tensor, kv_caches: Sequence[tuple[Tensor, ...]], backend: AttentionBackend) -> bool:
        """Whether a step with this residual can be played."""
        return (
            len(residual) <= len(self.residual)
            and residual.data_ptr() == self.residual.data_ptr()
            and kv_caches is self.kv_caches
            and backend is self.backend
        )
