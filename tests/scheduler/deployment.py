"""A deployment stepped by hand: the real engine and simulated workers, one message at a time, no time passing.

`run_plan` lets a worker run the oldest plan it has not run; what it answers waits in `results` until `deliver`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.config import EngineConfig
from protocol.model_config import ModelConfig
from scheduler import events as e
from scheduler.engine import Engine
from tests.sim.golden import golden_stream
from tests.sim.scenario import Scenario
from tests.sim.worker import SimulatedWorker

EOS = 1
VOCAB = 1000


def model_of(windows: tuple[int, ...] = (0,), vocab_size: int = VOCAB, max_len: int = 4096) -> ModelConfig:
    """A model with one layer for each window."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=max_len,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        layer_windows=windows,
        eos_token_ids=(EOS,),
    )


def greedy(max_tokens: int = 8, **more: Any) -> m.SamplingParams:
    return m.SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more})


def hello_of(worker: SimulatedWorker, **changes: Any) -> m.Hello:
    """What a worker says first, with some fields changed."""
    scenario = worker.scenario
    fields: dict[str, Any] = {
        "worker_id": worker.worker_id,
        "incarnation": worker.incarnation,
        "replica": worker.replica,
        "rank": 0,
        "tp_size": 1,
        "pid": 1 + worker.replica,
        "model_fingerprint": scenario.model.fingerprint,
        "block_size": scenario.config.block_size,
        "groups": scenario.model.cache_groups,
        "num_blocks": scenario.num_blocks[worker.replica],
        "max_model_len": scenario.config.max_model_len,
        "max_num_seqs": scenario.config.max_num_seqs,
        "kv_memory_id": worker.incarnation,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "simulated",
        "backend_reason": "",
    }
    return m.Hello(**{**fields, **changes})


class Deployment:
    """`num_blocks`: per replica, the null block included. Workers start at once unless `start` is False."""

    def __init__(
        self,
        *,
        windows: tuple[int, ...] = (0,),
        num_blocks: int | list[int] = 64,
        replicas: int = 1,
        start: bool = True,
        vocab_size: int = VOCAB,
        nan_per_1000: int = 0,
        **settings: Any,
    ):
        defaults = {"block_size": 4, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        self.config = EngineConfig(workers=replicas, debug_checks=True, **{**defaults, **settings})
        self.model = model_of(windows, vocab_size)
        sizes = [num_blocks] * replicas if isinstance(num_blocks, int) else num_blocks
        self.scenario = Scenario(0, self.config, self.model, sizes, [], [], {}, 0.0, nan_per_1000, 0.0, 0.0)
        self.engine = Engine(self.config, self.model, hash_key=b"secret")
        self.now = 0.0
        self.workers: list[SimulatedWorker | None] = [None] * replicas
        self.incarnations = [0] * replicas
        self.plans: dict[bytes, deque[m.SchedulerOutput]] = defaultdict(deque)
        self.sent_plans: list[m.SchedulerOutput] = []
        self.results: dict[bytes, deque[m.ModelRunnerOutput]] = defaultdict(deque)
        self.actions: list[e.Action] = []
        """Everything the engine asked for, in order."""
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, m.Finished] = {}
        self.rejected: dict[str, m.Rejected] = {}
        self.prompts: dict[str, tuple[list[int], m.SamplingParams]] = {}
        self._names: dict[tuple[bytes, int], str] = {}
        if start:
            for replica in range(replicas):
                self.start(replica)

    # ------------------------------------------------------------------------------------------------------- workers

    def start(self, replica: int = 0) -> SimulatedWorker:
        """A new incarnation of the worker says hello."""
        self.incarnations[replica] += 1
        worker = SimulatedWorker(self.scenario, replica, self.incarnations[replica])
        self.workers[replica] = worker
        self.handle(e.FromWorker(worker.identity, hello_of(worker)))
        return worker

    def worker(self, replica: int = 0) -> SimulatedWorker:
        """The living worker of a replica."""
        worker = self.workers[replica]
        assert worker is not None
        return worker

    def kill(self, replica: int = 0) -> SimulatedWorker:
        """The worker's process is gone and the supervisor says so. Returns it: it may still have said something."""
        worker = self.worker(replica)
        self.workers[replica] = None
        exited = m.WorkerExited(worker.worker_id, worker.incarnation, "signal 9")
        self.handle(e.FromSupervisor(b"supervisor", exited))
        return worker

    def run_plan(self, replica: int = 0) -> m.ModelRunnerOutput:
        """The worker runs its oldest plan; its result is on its way."""
        worker = self.worker(replica)
        plan = self.plans[worker.identity].popleft()
        tokens = worker.run(plan)
        result = m.ModelRunnerOutput(plan.epoch, plan.step, pack(tokens), plan.digest, b"")
        self.results[worker.identity].append(result)
        return result

    def deliver(self, worker: SimulatedWorker | None = None) -> None:
        """The oldest result under way of a worker arrives."""
        worker = worker or self.worker()
        self.handle(e.FromWorker(worker.identity, self.results[worker.identity].popleft()))

    def step(self, replica: int = 0) -> None:
        """Run one plan and deliver its result."""
        self.run_plan(replica)
        self.deliver(self.workers[replica])

    def run(self, most_steps: int = 10_000) -> int:
        """Step all living workers until none has a plan. Returns the number of steps."""
        for count in range(most_steps):
            busy = [w for w in self.workers if w is not None and (self.results[w.identity] or self.plans[w.identity])]
            if not busy:
                return count
            for worker in busy:
                if not self.results[worker.identity]:
                    self.run_plan(worker.replica)
                self.deliver(worker)
        raise AssertionError(f"still busy after {most_steps} steps")

    # ------------------------------------------------------------------------------------------------------- clients

    def submit(
        self,
        name: str,
        prompt: list[int],
        sampling: m.SamplingParams | None = None,
        client: bytes = b"client",
        **more: Any,
    ) -> None:
        sampling = sampling or greedy()
        self.prompts[name] = (prompt, sampling)
        self.handle(e.FromClient(client, m.Submit(name, pack(prompt), sampling, **more)))

    def abort(self, name: str, client: bytes = b"client") -> None:
        self.handle(e.FromClient(client, m.Abort(name)))

    def golden(self, name: str) -> list[int]:
        """The tokens of a request that runs alone."""
        prompt, sampling = self.prompts[name]
        return golden_stream(
            prompt,
            sampling,
            eos_token_ids=(EOS,),
            max_model_len=self.config.max_model_len,
            vocab_size=self.model.vocab_size,
            nan_per_1000=self.scenario.nan_per_1000,
        ).tokens

    def cached(self, name: str) -> int:
        return self.finished[name].usage.cached_tokens

    # -------------------------------------------------------------------------------------------------------- engine

    def handle(self, event: e.Event) -> list[e.Action]:
        """Give the engine an event; sort its actions into plans and streams. Everything crosses the codec."""
        actions = self.engine.handle(event, self.now)
        self.actions += actions
        for action in actions:
            if isinstance(action, e.ToWorker):
                message = codec.scheduler_to_worker.decode(codec.encode(action.message))
                self._to_worker(action.identity, message)
            elif isinstance(action, e.ToClient):
                self._to_client(action.identity, codec.scheduler_to_client.decode(codec.encode(action.message)))
        return actions

    def _to_worker(self, identity: bytes, message: m.SchedulerToWorker) -> None:
        worker = next((w for w in self.workers if w is not None and w.identity == identity), None)
        if isinstance(message, m.Welcome) and worker is not None:
            worker.batch.start_epoch(message.epoch)
        if isinstance(message, m.SchedulerOutput):
            self.plans[identity].append(message)
            self.sent_plans.append(message)

    def _to_client(self, identity: bytes, message: m.SchedulerToClient) -> None:
        match message:
            case m.Accepted(request_id, handle):
                self._names[identity, handle] = request_id
                self.tokens.setdefault(request_id, [])
            case m.TokenBatch(_, handles, indices, tokens):
                columns = unpack(handles).tolist(), unpack(indices).tolist(), unpack(tokens).tolist()
                for handle, index, token in zip(*columns, strict=True):
                    stream = self.tokens[self._names[identity, handle]]
                    assert index == len(stream), f"token {index} came, {len(stream)} was to come"
                    stream.append(token)
            case m.Finished(handle):
                self.finished[self._names[identity, handle]] = message
            case m.Rejected(request_id):
                self.rejected[request_id] = message

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        engine = self.engine
        assert not engine.requests and not len(engine.queue)
        for replica in engine.replicas:
            assert replica.manager.pool.num_free == replica.manager.pool.num_usable
            assert not replica.loose and not replica.rows.num_active
        engine.check()
