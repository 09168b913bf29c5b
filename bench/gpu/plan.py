"""The steps of a run on a GPU, correctness first, and how the time is shared out. Pure.

Each step is a command of its own with a limit of its own, so that one that hangs or crashes costs only itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

KERNEL_MODULES = ("torch", "triton", "numpy", "rich")
WORKER_MODULES = ("msgspec", "zmq", "psutil", "safetensors", "numba", "llguidance")
TEST_MODULES = ("pytest", "pytest_timeout", "hypothesis")
DEPLOYMENT_MODULES = ("tokenizers", "jinja2", "huggingface_hub", "gguf", "transformers")

START_S = 15.0
"""Loading torch, starting processes, writing files: what a step needs beyond its work."""
LEAST_S = 30.0
"""A step that is left with less is not begun."""


@dataclass(frozen=True)
class Step:
    """share: of the time that is left when it begins. needs: modules without which it is left out."""

    name: str
    argv: tuple[str, ...]
    share: float
    needs: tuple[str, ...]
    log: str  # name of its output, within the folder of the run

    def limit_s(self, left_s: float) -> float:
        return left_s * self.share


def steps_of(out: Path, minutes: float, only: str | None, parallel: int) -> list[Step]:
    """`tiles`, which tries tile shapes, runs only if asked for by name.

    parallel: cores for the tests, which mostly wait for compilers; 1: pytest-xdist is not there.

    Raises ValueError if `only` names no step.
    """
    pytest = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short")

    def tests(name: str, needs: tuple[str, ...], share: float, processes: int, *files: str) -> Step:
        report = f"--junitxml={out / f'{name}.xml'}"
        spread = ("-n", str(min(processes, parallel))) if parallel > 1 else ()
        return Step(name, (*pytest, *spread, report, *files), share, (*TEST_MODULES, *needs), f"{name}.log")

    timings = (
        sys.executable, "-m", "bench", "kernels", "--device", "cuda", "--json", str(out / "kernels.json"),
        "--minutes", "{minutes}",
    )  # fmt: skip
    serving = (*KERNEL_MODULES, *WORKER_MODULES, *DEPLOYMENT_MODULES)
    steps = [
        tests("test-kernels", (*KERNEL_MODULES, "numba"), 0.3, 12, "tests/kernels", "tests/gpu/test_kernels.py"),
        tests("test-serving", serving, 0.4, 5, "tests/gpu/test_deployment.py"),
        Step("kernels", timings, 1.0, KERNEL_MODULES, "kernels.log"),
    ]
    tiles = Step("tiles", (*timings[:4], "--tiles", *timings[4:-3], str(out / "tiles.json"), *timings[-2:]), 1.0,
                 KERNEL_MODULES, "tiles.log")  # fmt: skip
    if only == tiles.name:
        return [tiles]
    chosen = [step for step in steps if only is None or step.name.startswith(only)]
    if not chosen:
        raise ValueError(f"--only {only}: the steps are {', '.join(step.name for step in (*steps, tiles))}")
    return [*chosen[:-1], replace(chosen[-1], share=1.0)]


def argv_within(step: Step, limit_s: float) -> list[str]:
    """The command, told the time that it has: some of its limit is for starting and ending."""
    minutes = f"{max(limit_s - START_S, START_S) / 60:.2f}"
    return [part.replace("{minutes}", minutes) for part in step.argv]


def left_out(step: Step, left_s: float, missing: Callable[[tuple[str, ...]], list[str]]) -> str | None:
    """Why it is not begun, or None. missing: those of some modules that are not installed."""
    absent = missing(step.needs)
    if absent:
        return f"not installed: {', '.join(absent)} (bring them along with --wheels)"
    if left_s < LEAST_S:
        return f"only {max(0.0, left_s):.0f} s left"
    return None


def schedule(steps: list[Step], minutes: float) -> list[tuple[Step, float]]:
    """Each step with the seconds that it has if all before it use up theirs."""
    left_s = minutes * 60
    planned = []
    for step in steps:
        limit_s = step.limit_s(left_s)
        planned.append((step, limit_s))
        left_s -= limit_s
    return planned
