"""A GPU under measurement: launches recorded in a CUDA graph and replayed between events, inputs that take turns.

One graph holds as many launches as make a few milliseconds, so that what surrounds them does not count. Sets of inputs
take turns within it until more than twice the L2 cache has been read in between: each launch finds its data in memory,
as it would in a model. (Overwriting the cache instead would leave lines that the next launch pays to write back.)
"""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Sequence

import torch

from bench.kernels.device import Call
from bench.kernels.timing import Timing
from bench.kernels.work import Ceilings

GRAPH_US = 3000.0
MOST_LAUNCHES = 200
SAMPLES = 20
COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192
CLOCK_WARM_UP_S = 1.0
MOST_SETS = 256


class CudaBench:
    """The current CUDA device. It is measured as it is found: no setting of it is touched."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.backends: tuple[str, ...] = ("triton",)
        self.num_threads: int | None = None
        self._properties = torch.cuda.get_device_properties(self.device)

    def describe(self) -> dict[str, str | int | None]:
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = None
        properties = self._properties
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton,
            **_query("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu"),
        }

    def cannot(self) -> list[str]:
        return []

    def measure_ceilings(self) -> Ceilings:
        n = MATMUL_SIZE
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        deadline = time.perf_counter() + CLOCK_WARM_UP_S
        while time.perf_counter() < deadline:  # an idle GPU runs at a fraction of its clock
            torch.mm(a, b)
            torch.cuda.synchronize()
        product = torch.empty_like(a)
        matmul = self.time([lambda: torch.mm(a, b, out=product)], cold=True, limit_s=2.0)
        free, _ = torch.cuda.mem_get_info(self.device)
        copy_bytes = min(COPY_BYTES, free // 4)
        source = torch.zeros(copy_bytes, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        copy = self.time([lambda: target.copy_(source)], cold=True, limit_s=2.0)
        rate = 2 * n**3 / matmul.median_us * 1e6
        # float16 runs at bfloat16's rate; for float32 there is no claim
        return Ceilings(2 * copy_bytes / copy.median_us * 1e6, {"bfloat16": rate, "float16": rate})

    def num_sets(self, set_bytes: int) -> tuple[int, bool]:
        free, _ = torch.cuda.mem_get_info(self.device)
        wanted = max(2, -(-2 * self._properties.L2_cache_size // max(1, set_bytes)) + 1)
        possible = max(1, min(MOST_SETS, free // 3 // max(1, set_bytes)))
        return min(wanted, possible), wanted <= possible

    def time(self, calls: Sequence[Call], *, cold: bool, limit_s: float) -> Timing:
        deadline = time.perf_counter() + limit_s
        for call in calls:  # compiles, plans, takes workspaces: none of it may be recorded
            call()
        torch.cuda.synchronize()
        once_us = _between_events(lambda: [call() for call in calls]) / len(calls)
        rounds = max(1, min(MOST_LAUNCHES, round(GRAPH_US / max(once_us, 1.0))) // len(calls))
        launches = rounds * len(calls)

        def body() -> None:
            for turn in range(launches):
                calls[turn % len(calls)]()

        replay, timed_by = _recorded(body)
        replay()
        samples: list[float] = []
        while not samples or (len(samples) < SAMPLES and time.perf_counter() < deadline):
            samples.append(_between_events(replay) / launches)
        return Timing.of(samples, calls_per_sample=launches, timed_by=timed_by, cold=cold)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def _between_events(run: Callable[[], object]) -> float:
    """Microseconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _recorded(body: Callable[[], None]) -> tuple[Callable[[], object], str]:
    """What runs body's launches again, and how: from a graph, or anew where a graph cannot hold them."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            body()
    except RuntimeError:  # something in it waits for the host
        torch.cuda.synchronize()
        return body, "events"
    return graph.replay, "graph"


def _query(*fields: str) -> dict[str, str | int | None]:
    """What nvidia-smi says, as text; None where there is no such program or field."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(fields)
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(fields, values, strict=False))
