"""How a GPU is timed, with its clock scripted: what is launched how often, in which turn, and recorded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bench.kernels import on_cuda
from bench.kernels.cases import cuda_cases
from bench.kernels.device import LINEAR
from bench.kernels.on_cuda import GRAPH_US, MOST_LAUNCHES, SAMPLES, CudaBench
from bench.kernels.session import backends_of


class Scripted:
    """Each launch takes `launch_us` on a device whose clock only launches move."""

    def __init__(self, launch_us: float) -> None:
        self.launch_us = launch_us
        self.launches: list[int] = []

    def call(self, number: int) -> Callable[[], None]:
        return lambda: self.launches.append(number)

    def between_events(self, run: Callable[[], object]) -> float:
        before = len(self.launches)
        run()
        return (len(self.launches) - before) * self.launch_us


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> CudaBench:
    """An H200 as far as sizes go."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60 * 2**20, name="H200")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 * 2**30, 140 * 2**30))
    return CudaBench()


@pytest.mark.parametrize(("launch_us", "sets"), [(250.0, 2), (3.0, 40), (9000.0, 2), (0.5, 3)])
def test_sets_take_turns_and_a_sample_is_a_few_milliseconds(
    bench: CudaBench, monkeypatch: pytest.MonkeyPatch, launch_us: float, sets: int
):
    device = Scripted(launch_us)
    monkeypatch.setattr(on_cuda, "_between_events", device.between_events)
    monkeypatch.setattr(on_cuda, "_recorded", lambda body: (body, "graph"))
    timing = bench.time([device.call(number) for number in range(sets)], cold=True, limit_s=60)
    assert timing.samples == SAMPLES
    assert timing.median_us == pytest.approx(launch_us)
    assert timing.timed_by == "graph"
    per_sample = timing.calls_per_sample
    assert per_sample % sets == 0
    assert per_sample <= max(sets, MOST_LAUNCHES)
    assert per_sample * launch_us <= max(GRAPH_US * 1.5, sets * launch_us)
    assert device.launches == [*range(sets)] * (len(device.launches) // sets), "in turn, from the first launch on"


def test_the_time_for_samples_is_kept(bench: CudaBench, monkeypatch: pytest.MonkeyPatch):
    device = Scripted(10.0)
    now = iter(float(second) for second in range(1000))
    monkeypatch.setattr(on_cuda.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(on_cuda, "_between_events", device.between_events)
    monkeypatch.setattr(on_cuda, "_recorded", lambda body: (body, "graph"))
    assert bench.time([device.call(0)], cold=False, limit_s=5).samples == 5


def test_what_cannot_be_recorded_is_launched(monkeypatch: pytest.MonkeyPatch):
    class Refusing:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *exc: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: Refusing())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    ran = []
    run, timed_by = on_cuda._recorded(lambda: ran.append(1))
    assert timed_by == "events"
    run()
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("set_bytes", "expected"),
    [(2**30, (2, True)), (168 * 10**6, (2, True)), (2**20, (121, True)), (1000, (256, False))],
)
def test_more_than_twice_the_l2_cache_is_read_before_a_set_comes_again(
    bench: CudaBench, set_bytes: int, expected: tuple[int, bool]
):
    assert bench.num_sets(set_bytes) == expected
    num_sets, cold = expected
    assert cold == ((num_sets - 1) * set_bytes >= 2 * 60 * 2**20)


def test_on_a_gpu_the_kernels_are_tritons_and_each_case_has_one_implementation(bench: CudaBench):
    for case in cuda_cases():
        assert backends_of(case, bench) == ((LINEAR,) if case.kind == "gemm" else ("triton",))


@pytest.mark.parametrize("module", ["test_kernels", "test_deployment"])
def test_what_runs_only_on_a_gpu_can_still_be_imported(module: str):
    found = importlib.import_module(f"tests.gpu.{module}")
    assert [name for name in vars(found) if name.startswith("test_")]
