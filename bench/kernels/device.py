"""What a device must offer to be measured, and what all of them share. Knows no case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bench.kernels.timing import Timing
from bench.kernels.work import Ceilings

Call = Callable[[], object]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


LINEAR = "linear"
INT8 = "linear, int8"
"""The worker's linear layer, with weights as they are and with 8-bit ones."""


class CannotMeasure(Exception):
    """A case that this device or installation cannot run. The message says why."""


class Bench(Protocol):
    """One device."""

    device: torch.device
    backends: tuple[str, ...]
    """Attention backends that are measured here, by name."""
    num_threads: int | None
    """Cores that backends may use; None: means nothing here."""

    def describe(self) -> dict[str, str | int | None]:
        """What it is. See bench/kernels/results.py."""
        ...

    def cannot(self) -> list[str]:
        """Sentences: what a run here can not show."""
        ...

    def measure_ceilings(self) -> Ceilings:
        """Bring it to its working clocks, then copy and multiply as much as it can."""
        ...

    def num_sets(self, set_bytes: int) -> tuple[int, bool]:
        """How many sets of inputs of `set_bytes` must take turns so that each has left the caches when its turn comes
        again; and whether so many can be had (else: as many as memory and time allow)."""
        ...

    def time(self, calls: Sequence[Call], *, cold: bool, limit_s: float) -> Timing:
        """Call them in turn, for about `limit_s` at most. cold: as `num_sets` said."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was started is done."""
        ...

    def release(self) -> None:
        """Give back the memory of the last case."""
        ...


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """‖result - expected‖ / ‖expected‖ in float32."""
    expected = expected.float()
    return float((result.float() - expected).norm() / expected.norm())
