"""How long a worker waits between two steps: a real scheduler and a real worker, over their sockets.

The gap is what the worker itself measures: from the end of a step to the moment it takes up the next plan. It is the
time to write and send a result and to receive and read a plan, if the plan is there by then; else the scheduler's time
comes on top. With two steps in flight it should always be there. Where a device computes beside the worker, the gap is
the device's: from the end of a step to when it can begin with the next.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.control.steady_load import STEPS_A_LOOK, SteadyLoad
from bench.processes import ServerProcess, start_pageplane
from protocol import runtime
from protocol.config import EngineConfig
from protocol.lifeline import SUPERVISOR_ENV
from protocol.messages import STEP_COLUMNS

_ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 120.0
WARM_UP_STEPS = 64
PROMPT_LEN = 64

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
"""What a simulated worker is said to serve; it computes none of it."""


@dataclass(frozen=True)
class GapCase:
    """n requests decode; at least `steps` of their steps are measured. step_s: what the model takes in each step of a
    simulated worker; None: a real one, on the CPU. pipeline_depth: most steps in flight; device: the model computes
    beside the worker (both of the simulated worker only)."""

    label: str
    n: int
    steps: int
    step_s: float | None = None
    pipeline_depth: int = 2
    device: bool = False


def gap_cases(quick: bool) -> list[GapCase]:
    """What is measured, in order."""
    if quick:
        return [GapCase("simulated, 5 ms steps, 1,024 rows", 1024, 200, 0.005), GapCase("CPU, 16 rows", 16, 60)]
    return [
        GapCase("simulated, 5 ms steps, 1,024 rows", 1024, 1500, 0.005),
        GapCase("simulated, 5 ms steps, 1,024 rows, one step in flight", 1024, 500, 0.005, pipeline_depth=1),
        GapCase("simulated device, 5 ms steps, 1,024 rows", 1024, 500, 0.005, device=True),
        GapCase("simulated device, 2 ms steps, 1,024 rows", 1024, 500, 0.002, device=True),
        GapCase("simulated device, 1 ms steps, 1,024 rows", 1024, 500, 0.001, device=True),
        GapCase("CPU, 16 rows", 16, 480),
    ]


def measure_gap(case: GapCase, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a case on its own deployment; see `gap_numbers`. Raises StartFailed or LoadFailed."""
    with tempfile.TemporaryDirectory(prefix="pp-gap-") as folder:
        progress(f"{case.label}: starting")
        start = _real if case.step_s is None else _simulated
        with start(case, Path(folder)) as endpoint, SteadyLoad(endpoint) as load:
            lengths = [PROMPT_LEN + i % 16 for i in range(case.n)]  # blocks are opened in turns
            load.start(lengths, max_tokens=WARM_UP_STEPS + 2 * case.steps + 8 * STEPS_A_LOOK)
            load.pass_steps(WARM_UP_STEPS)
            records = load.steps(case.steps, lambda done: progress(f"{case.label}: {done} of {case.steps} steps"))
    about = {"n": case.n, "step_s": case.step_s, "pipeline_depth": case.pipeline_depth, "device": case.device}
    return about | gap_numbers(records, case.n, case.device)


def gap_numbers(records: NDArray[np.int32], n: int, device: bool = False) -> dict[str, Any]:
    """The keys of a case in the JSON (see bench/control/summary.py). records: int32 [steps, STEP_COLUMNS]; only those
    in which all n rows decode count. device: what the host does besides is no work of the step's."""
    columns = {name: records[:, i].astype(np.float64) for i, name in enumerate(STEP_COLUMNS)}
    steady = (columns["rows"] == n) & (columns["tokens"] == n)
    gap = columns["idle_us"][steady]
    parts = ("forward_us", "sample_us") if device else ("apply_us", "commit_us", "forward_us", "sample_us")
    work = sum(columns[name][steady] for name in parts)
    server = columns["schedule_us"][steady] + columns["result_us"][steady] + columns["encode_us"][steady]
    return {
        "steps": int(steady.sum()),
        "gap_us": _quantiles(gap),
        "work_us": _quantiles(work),
        "scheduler_us": _quantiles(server),
        "gap_share": float(gap.sum() / (gap.sum() + work.sum())),
    }


def _quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {
        "p50": float(np.quantile(values, 0.5)),
        "p90": float(np.quantile(values, 0.9)),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
    }


@contextmanager
def _real(case: GapCase, folder: Path) -> Iterator[str]:
    """launch.py with one worker and the default model; gives its client endpoint."""
    arguments = f"--workers 1 --no-gateway --max-num-seqs {case.n}"
    server, _, ready = start_pageplane(arguments, folder / "ready.json", folder / "log", START_S)
    with server:
        yield ready["endpoints"]["client"]


@contextmanager
def _simulated(case: GapCase, folder: Path) -> Iterator[str]:
    """A scheduler and a simulated worker, without supervisor and gateway; gives the client endpoint."""
    (folder / "config.json").write_text(json.dumps(TINY_MODEL))
    config = EngineConfig(
        model=str(folder),
        workers=1,
        load_format="dummy",
        device="cpu",
        attention_backend="torch",
        max_num_seqs=case.n,
        max_num_batched_tokens=max(8192, case.n),
        max_model_len=8192,
        max_waiting=2 * case.n,
        pipeline_depth=case.pipeline_depth,
        threads_per_worker=1,
    )
    sockets = runtime.create()
    config.save(sockets / "engine.json")
    common = ["--config", str(sockets / "engine.json"), "--runtime", str(sockets)]
    worker = ["bench.control.simulated_worker", *common, "--step-s", str(case.step_s)]
    if case.device:
        worker.append("--device")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", SUPERVISOR_ENV: str(os.getpid())}

    def process(*module: str) -> ServerProcess:
        log = folder / f"{module[0]}.log"
        return ServerProcess([sys.executable, "-m", *module], log, cwd=_ROOT, env=environment)

    with ExitStack() as stack:
        stack.callback(runtime.remove, sockets)
        scheduler = stack.enter_context(process("scheduler", *common))
        scheduler.wait_until((sockets / "endpoints.json").exists, START_S)
        stack.enter_context(process(*worker))
        yield runtime.read_endpoints(sockets).client
