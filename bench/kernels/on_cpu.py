"""A CPU under measurement: the wall clock, the caches, and what copying and multiplying reach on these cores."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.kernels.device import Call
from bench.kernels.timing import Timing
from bench.kernels.work import Ceilings
from bench.machine import describe_machine

SAMPLE_S = 200e-6
"""Shorter calls are timed several at a time."""
MAX_SAMPLES = 100
MOST_SETS_BYTES = 64 * 2**20
MOST_SETS = 64
DEFAULT_CACHE_BYTES = 32 * 2**20
BUSY = 0.5
"""Load a core beyond which what is measured is mostly the others."""


class CpuBench:
    """The cores of this machine, `num_threads` of them."""

    def __init__(self, num_threads: int):
        self.device = torch.device("cpu")
        self.backends: tuple[str, ...] = ("cpu", "torch")
        self.num_threads: int | None = num_threads
        self._cache_bytes = last_level_cache_bytes()
        torch.set_num_threads(num_threads)

    def describe(self) -> dict[str, str | int | None]:
        return {
            "type": "cpu",
            "name": describe_machine()["cpu"],
            "threads": self.num_threads,
            "cache_bytes": self._cache_bytes,
            "load_1m": f"{os.getloadavg()[0]:.2f}",
            "torch": torch.__version__,
        }

    def cannot(self) -> list[str]:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        busy = [
            f"Other work runs on this machine (load average {load:.1f} on {cores} cores): the times below are noise, "
            "and none of them should be quoted."
        ]
        return (busy if load > BUSY * cores else []) + [
            "No CUDA device: nothing is said of the Triton kernels' speed, nor of the targets for a GPU "
            "(docs/gpu.md has the command for a machine that has one).",
            "Below: attention, cache writes and matrix products of the CPU backends.",
        ]

    def measure_ceilings(self) -> Ceilings:
        """The best of several runs: a ceiling is what the machine can do, not what it did at a bad moment."""
        copy_bytes = 256 * 2**20
        source = torch.ones(copy_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        copy_us = self.time([lambda: target.copy_(source)], cold=True, limit_s=1.5).min_us
        rates = {}
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            rates[name] = max(self._matmul_rate(dtype, size) for size in ((1024, 1024, 1024), (512, 576, 3072)))
        return Ceilings(2 * copy_bytes / copy_us * 1e6, rates)

    def _matmul_rate(self, dtype: torch.dtype, size: tuple[int, int, int]) -> float:
        """Operations a second of the better of torch's product and the packed one that the worker uses."""
        from worker.layers.quantization import make_linear

        rows, inputs, outputs = size
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        packed = make_linear(weight)
        with torch.inference_mode():
            calls: list[Call] = [lambda: torch.nn.functional.linear(x, weight), lambda: packed(x)]
            best_us = min(self.time([call], cold=False, limit_s=0.6).min_us for call in calls)
        return 2 * rows * inputs * outputs / best_us * 1e6

    def num_sets(self, set_bytes: int) -> tuple[int, bool]:
        wanted = -(-2 * self._cache_bytes // max(1, set_bytes)) + 1
        possible = max(1, min(MOST_SETS, MOST_SETS_BYTES // max(1, set_bytes)))
        return min(wanted, possible), wanted <= possible

    def time(self, calls: Sequence[Call], *, cold: bool, limit_s: float) -> Timing:
        clock = time.perf_counter
        deadline = clock() + limit_s
        for call in calls[:2]:  # compiles, takes threads and memory
            call()
        start = clock()
        calls[-1]()
        inner = max(1, int(SAMPLE_S / max(clock() - start, 1e-9)))
        samples: list[float] = []
        turn = 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            while not samples or (len(samples) < MAX_SAMPLES and clock() < deadline):
                start = clock()
                for _ in range(inner):
                    calls[turn % len(calls)]()
                    turn += 1
                samples.append((clock() - start) / inner * 1e6)
        finally:
            if collecting:
                gc.enable()
        return Timing.of(samples, calls_per_sample=inner, timed_by="clock", cold=cold)

    def synchronize(self) -> None:
        """A call has ended when it returns."""

    def release(self) -> None:
        """Memory goes back by itself."""


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the largest cache that core 0 uses; a guess where the system does not tell."""
    sizes = [_parse_size(path.read_text()) for path in root.glob("index*/size")]
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def _parse_size(text: str) -> int:
    text = text.strip()
    return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
