"""The profiler around steps: what ran is listed by its own time, kernels that torch cannot see by name."""

from __future__ import annotations

import torch

from kernels.torch_backend import create
from worker.profiler import MOST_ROWS, STEP, StepProfiler


class Runner:
    """As much of a runner as a profiler needs."""

    def __init__(self) -> None:
        self.backend = create(1)
        self.device = torch.device("cpu")

    def step(self) -> None:
        cache = torch.zeros(4, 1, 2, 16)
        self.backend.copy_blocks([cache], torch.tensor([1]), torch.tensor([2]))
        torch.ones(64, 64) @ torch.ones(64, 64)


def run(profiler: StepProfiler, runner: Runner, steps: int) -> None:
    for _ in range(steps):
        with profiler.step(runner):
            runner.step()


def test_it_lists_what_ran_in_the_steps_that_were_asked_for() -> None:
    profiler, runner = StepProfiler(), Runner()
    run(profiler, runner, 1)  # off: not counted
    profiler.start(2)
    assert profiler.active and not profiler.complete
    backend = runner.backend
    run(profiler, runner, 5)
    assert profiler.complete and runner.backend is backend
    found = profiler.report()
    calls = {kernel.name: kernel.calls for kernel in found.kernels}
    assert (found.steps, found.device, profiler.active) == (2, "cpu", False)
    assert calls["aten::mm"] == calls[STEP] == calls["torch::copy_blocks"] == 2
    times = [kernel.self_us for kernel in found.kernels]
    assert times == sorted(times, reverse=True) and len(times) <= MOST_ROWS + 1
    assert 0 < sum(times) <= found.wall_us * 1.05
    assert runner.backend.counters["copy_blocks"] == 6, "profiled or not, each call is counted"


def test_stopped_early_it_tells_what_there_is() -> None:
    profiler, runner = StepProfiler(), Runner()
    profiler.start(10)
    assert profiler.report().steps == 0
    profiler.start(10)
    run(profiler, runner, 1)
    assert profiler.report().steps == 1


def test_a_step_that_fails_leaves_the_backend_as_it_was() -> None:
    profiler, runner = StepProfiler(), Runner()
    backend = runner.backend
    profiler.start(1)
    try:
        with profiler.step(runner):
            raise ValueError("a plan that does not fit")
    except ValueError:
        pass
    assert runner.backend is backend and profiler.report().steps == 0
