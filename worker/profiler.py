"""torch's profiler around a number of steps of this worker: what each kernel took, as a table. Costs nothing when off.

`torch.profiler.profile` is a shell around `torch.autograd.profiler.profile`, which is used here without it: the shell
loads the whole compiler (torch._inductor) at its first start, in the middle of serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from kernels.backend import AttentionBackend
from protocol.messages import KernelShare, Profile

MOST_ROWS = 60
"""Kernels that are listed; the rest is added up."""
STEP = "step, outside of what is listed"
"""What a step spends in no listed operation: Python, and compiled code that torch does not know."""
_CALLS = ("write_kv", "rotate_and_write_kv", "paged_attention", "copy_blocks")


class Profiled(Protocol):
    """What is profiled: a runner."""

    backend: AttentionBackend
    device: torch.device


class StepProfiler:
    """Off until `start`; then `step` goes around each step until `report` has been taken."""

    def __init__(self) -> None:
        self.active = False
        """From `start` until the report has been taken."""
        self._profile: Any = None
        self._recording = False
        self._left = 0
        self._done = 0
        self._wall_s = 0.0

    @property
    def complete(self) -> bool:
        """Whether it is on and all steps have run."""
        return self.active and self._left == 0

    def start(self, steps: int) -> None:
        """Profile the next `steps` steps. One that is still on is given up."""
        self._stop()
        self._profile = profile(use_device="cuda" if torch.cuda.is_available() else None)
        self._profile.__enter__()
        self.active = self._recording = True
        self._left, self._done, self._wall_s = steps, 0, 0.0

    @contextmanager
    def step(self, runner: Profiled) -> Iterator[None]:
        """Around one step. Kernels that torch cannot see on a CPU (Numba) are named for it meanwhile."""
        if not self.active or self._left == 0:
            yield
            return
        backend, began = runner.backend, time.monotonic()
        if runner.device.type == "cpu":
            runner.backend = _Named(backend)
        try:
            with record_function(STEP):
                yield
                if runner.device.type == "cuda":
                    torch.cuda.synchronize(runner.device)
        finally:
            runner.backend = backend
        self._left -= 1
        self._done += 1
        self._wall_s += time.monotonic() - began
        if self._left == 0:
            self._stop()

    def report(self) -> Profile:
        """Stop; what the steps that ran took. By self time of kernels on a GPU, of operations on a CPU."""
        self._stop()
        events = self._profile.key_averages() if self._done else []
        self._profile, self.active = None, False
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        rows = [
            (event.key, event.count, event.self_device_time_total if on_device else event.self_cpu_time_total)
            for event in on_device or events
        ]
        rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
        rest = rows[MOST_ROWS:]
        if rest:
            rows = [*rows[:MOST_ROWS], (f"{len(rest)} others", sum(r[1] for r in rest), sum(r[2] for r in rest))]
        return Profile(
            steps=self._done,
            wall_us=round(self._wall_s * 1e6),
            device="cuda" if on_device else "cpu",
            kernels=tuple(KernelShare(name, count, round(us)) for name, count, us in rows),
        )

    def _stop(self) -> None:
        if self._recording:
            self._profile.__exit__(None, None, None)
            self._recording = False


class _Named:
    """A backend whose calls show up in a profile by name."""

    def __init__(self, backend: AttentionBackend):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "replay":
            raise AttributeError("a step that is profiled makes its calls one by one")
        found = getattr(self._backend, name)
        return self._recorded(name, found) if name in _CALLS else found

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        label = f"{self._backend.name}::{name}"

        def recorded(*arguments: Any, **named: Any) -> Any:
            with record_function(label):
                return call(*arguments, **named)

        return recorded
