"""`python -m bench.control.simulated_worker`: the real worker process around a model that takes a fixed time.

Socket, handshake, plans, batch state, block tables and results are the real ones; only the model is replaced, by
waiting (as for a GPU, which leaves the core to others) and drawing any tokens. Started by `bench.control.gap`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from protocol import logs
from protocol.config import EngineConfig
from protocol.lifeline import die_with_supervisor
from protocol.messages import LogprobsLists
from protocol.runtime import read_endpoints
from worker.batch import StepInputs
from worker.runner import ModelRunner
from worker.server import serve


class SimulatedRunner(ModelRunner):
    """`step_s`: seconds that the model of each step takes."""

    def __init__(self, config: EngineConfig, num_threads: int, replica: int, step_s: float):
        super().__init__(config, num_threads, replica=replica)
        self.step_s = step_s
        self._random = np.random.default_rng(0)

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def _forward(self, step: StepInputs) -> torch.Tensor:
        time.sleep(self.step_s)
        return torch.empty(0)

    def _sample(self, step: StepInputs, hidden: torch.Tensor) -> tuple[np.ndarray, LogprobsLists | None]:
        rows = step.rows[step.sampling]
        tokens = self._random.integers(2, self.model_config.vocab_size, len(rows), dtype=np.int32)
        self.batch.append_sampled(rows, tokens)
        return tokens, None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control.simulated_worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    arguments = parser.parse_args()
    die_with_supervisor()
    logs.set_up("worker-0", "info")
    config = EngineConfig.load(arguments.config)
    make_runner = partial(SimulatedRunner, step_s=arguments.step_s)
    serve(config, "worker-0", 0, "simulated", read_endpoints(arguments.runtime), arguments.runtime, make_runner)


if __name__ == "__main__":
    main()
