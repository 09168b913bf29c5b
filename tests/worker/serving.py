"""The real scheduler core and one real runner in one process: requests in, tokens out, step by step."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.config import EngineConfig
from scheduler import events as e
from scheduler.engine import Engine
from worker.runner import ModelRunner

CLIENT = b"client"


def config_of(model: Path, **changes: Any) -> EngineConfig:
    """A small float32 deployment of one worker on the CPU."""
    settings: dict[str, Any] = {
        "model": str(model), "workers": 1, "device": "cpu", "dtype": "float32", "block_size": 8, "max_model_len": 96,
        "max_num_seqs": 10, "max_num_batched_tokens": 24, "kv_memory": "4MiB", "debug_checks": True,
    }  # fmt: skip
    return EngineConfig(**{**settings, **changes})


def greedy(max_tokens: int = 12, **more: Any) -> m.SamplingParams:
    return m.SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more})


class Serving:
    """`plans` are those that the runner was given, in order; `tokens` what each request was sent."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.engine = Engine(runner.config, runner.model_config, hash_key=b"secret")
        self.plans: list[m.SchedulerOutput] = []
        self.outputs: list[m.ModelRunnerOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, m.Finished] = {}
        self._waiting: deque[m.SchedulerOutput] = deque()
        self._results: deque[m.ModelRunnerOutput] = deque()
        self._names: dict[int, str] = {}
        self._incarnation = 0
        self.hello()

    def hello(self) -> None:
        """The worker says hello under a new name, as after a restart: what it ran before is void."""
        self._incarnation += 1
        runner, config = self.runner, self.runner.config
        hello = m.Hello(
            worker_id="worker-0", incarnation=str(self._incarnation), replica=0, rank=0, tp_size=1, pid=1,
            model_fingerprint=runner.model_config.fingerprint, block_size=config.block_size,
            groups=runner.model_config.cache_groups, num_blocks=runner.cache.num_blocks,
            max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs, kv_memory_id=str(self._incarnation),
            device="cpu", dtype="float32", attention_backend=runner.backend.name, backend_reason="",
        )  # fmt: skip
        self._waiting.clear()
        self._results.clear()
        self._handle(e.FromWorker(self._identity, hello))

    def submit(self, name: str, prompt: list[int], sampling: m.SamplingParams | None = None) -> None:
        self.tokens[name] = []
        self._handle(e.FromClient(CLIENT, m.Submit(name, pack(prompt), sampling or greedy())))

    def abort(self, name: str) -> None:
        self._handle(e.FromClient(CLIENT, m.Abort(name)))

    def step(self) -> bool:
        """One plan to the runner, or what it still owes if there is none; the results back. False: nothing is left."""
        if self._waiting:
            plan = self._waiting.popleft()
            self.plans.append(plan)
            self.runner.submit(plan, lambda output: self.deliver(output))
        else:
            self.runner.flush(lambda output: self.deliver(output))
            if not self._results:
                return False
        while self._results:
            output = self._results.popleft()
            self.outputs.append(output)
            self._handle(e.FromWorker(self._identity, output))
        return True

    def deliver(self, output: m.ModelRunnerOutput) -> None:
        """A result, at the moment at which the runner gives it."""
        self._results.append(output)

    def run(self) -> None:
        """Until every request has ended and every block is free again."""
        while self.step():
            pass
        assert not self.engine.requests
        [replica] = self.engine.replicas
        assert replica.manager.pool.num_free == replica.manager.pool.num_usable

    @property
    def _identity(self) -> bytes:
        return f"worker-0-{self._incarnation:016x}".encode()

    def _handle(self, event: e.Event) -> None:
        for action in self.engine.handle(event, 0.0):
            if isinstance(action, e.ToWorker) and action.identity == self._identity:
                self._to_worker(action.message)
            elif isinstance(action, e.ToClient):
                self._to_client(action.message)

    def _to_worker(self, message: m.SchedulerToWorker) -> None:
        match message:
            case m.Welcome(_, epoch, _):
                self.runner.start_epoch(epoch)
            case m.SchedulerOutput():
                self._waiting.append(message)
            case _:
                raise AssertionError(message)

    def _to_client(self, message: m.SchedulerToClient) -> None:
        match message:
            case m.Accepted(request_id, handle):
                self._names[handle] = request_id
            case m.TokenBatch(_, handles, indices, tokens):
                columns = unpack(handles).tolist(), unpack(indices).tolist(), unpack(tokens).tolist()
                for handle, index, token in zip(*columns, strict=True):
                    stream = self.tokens[self._names[handle]]
                    assert index == len(stream)
                    stream.append(token)
            case m.Finished(handle):
                self.finished[self._names[handle]] = message
            case m.Rejected():
                raise AssertionError(message)
