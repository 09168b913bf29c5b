"""`python -m bench.control.simulated_worker`: the real worker process around a model that takes a fixed time.

Socket, handshake, plans, batch state, block tables and results are the real ones; only the model is replaced, by time
that passes, and the sampler, by drawing any tokens. Either the worker waits for the model, as on a CPU (but leaves the
core to others), or a device computes beside it, as on a GPU. Started by `bench.control.gap`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.control.simulated_device import SimulatedDevice
from protocol import logs
from protocol.config import EngineConfig
from protocol.lifeline import die_with_supervisor
from protocol.messages import LogprobsLists
from protocol.runtime import read_endpoints
from worker.batch import StepInputs
from worker.graphs import RecordedStep
from worker.pipelined import PipelinedRunner
from worker.runner import ModelRunner
from worker.server import serve
from worker.upload import Upload


class SimulatedRunner(ModelRunner):
    """The runner of a CPU. `step_s`: seconds that the model of each step takes."""

    def __init__(self, config: EngineConfig, num_threads: int, replica: int, step_s: float):
        super().__init__(config, num_threads, replica=replica)
        self.cache.ahead = None  # no memory need be made ready: nobody will write there
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


class SimulatedPipelinedRunner(PipelinedRunner):
    """The runner of a GPU. `step_s`: seconds that the device computes in each step."""

    def __init__(self, config: EngineConfig, num_threads: int, replica: int, step_s: float):
        simulated = SimulatedDevice()
        super().__init__(config, num_threads, replica=replica, make_device=lambda device: simulated)
        self.step_s = step_s
        self._simulated = simulated
        self._random = np.random.default_rng(0)

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def _enqueue_forward(
        self, step: StepInputs, upload: Upload, recorded: RecordedStep | None
    ) -> tuple[Tensor, Tensor]:
        self._simulated.compute(self.step_s)
        return torch.empty(0), torch.empty(0)

    def _enqueue_sampling(
        self, rows: np.ndarray, logits: Tensor, upload: Upload
    ) -> tuple[Tensor, LogprobsLists | None]:
        tokens = torch.from_numpy(self._random.integers(2, self.model_config.vocab_size, len(rows), dtype=np.int32))
        self._last_token.index_copy_(0, upload.views["sampling_rows"], tokens)
        return tokens, None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control.simulated_worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--device", action="store_true", help="that computes beside the worker")
    arguments = parser.parse_args()
    die_with_supervisor()
    logs.set_up("worker-0", "info")
    config = EngineConfig.load(arguments.config)
    runner: Callable[..., ModelRunner] = SimulatedPipelinedRunner if arguments.device else SimulatedRunner
    make_runner = partial(runner, step_s=arguments.step_s)
    serve(config, "worker-0", 0, "simulated", read_endpoints(arguments.runtime), arguments.runtime, make_runner)


if __name__ == "__main__":
    main()
