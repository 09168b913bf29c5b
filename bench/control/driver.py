"""The real engine without sockets: one worker that answers every plan at once with tokens that end nothing."""

from __future__ import annotations

import random
import uuid
from array import array

import numpy as np

from protocol import messages as m
from protocol.arrays import pack
from protocol.config import EngineConfig
from protocol.model_config import ModelConfig
from scheduler import events as e
from scheduler.engine import Engine

VOCAB = 49152
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16384
WORKER = b"worker-0-bench"
CLIENT = b"client"
HASH_KEY = b"bench"


def random_tokens(rng: random.Random, count: int) -> bytes:
    """A prompt as it travels: int32, little endian."""
    return array("i", [rng.randrange(VOCAB) for _ in range(count)]).tobytes()


class Driver:
    """windows: one layer and so one cache group for each different one; 0: full attention. num_blocks: the null block
    included."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int = 100_000,
        windows: tuple[int, ...] = (0,),
        pipeline_depth: int = 2,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = MAX_MODEL_LEN,
        enable_prefix_caching: bool = True,
    ):
        self.config = EngineConfig(
            model="none",
            workers=1,
            block_size=block_size,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=1_000_000,
            pipeline_depth=pipeline_depth,
        )
        self.model = _model(windows)
        self.engine = Engine(self.config, self.model, hash_key=HASH_KEY)
        self.replica = self.engine.replicas[0]
        self.plan: m.SchedulerOutput | None = None
        """The latest."""
        self.num_plans = 0
        self.finished: list[m.Finished] = []
        self.num_tokens = 0
        self._pending: list[m.SchedulerOutput] = []
        self._take(self.engine.handle(e.FromWorker(WORKER, _hello(self.config, self.model, num_blocks)), 0.0))

    def submit(self, prompt: bytes, max_tokens: int) -> list[e.Action]:
        """Queue a request (and plan it, where a step may be issued)."""
        sampling = m.SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
        actions = self.engine.handle(e.FromClient(CLIENT, m.Submit(uuid.uuid4().hex, prompt, sampling)), 0.0)
        self._take(actions)
        return actions

    def submit_all(self, prompts: list[bytes], max_tokens: int) -> None:
        """Queue several that arrive together."""
        sampling = m.SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
        events = [e.FromClient(CLIENT, m.Submit(uuid.uuid4().hex, prompt, sampling)) for prompt in prompts]
        self._take(self.engine.handle_all(events, 0.0))

    @property
    def busy(self) -> bool:
        """Whether a plan waits for its result."""
        return bool(self._pending)

    def next_result(self) -> e.FromWorker:
        """What the worker answers to the oldest plan in flight: random tokens, the digest as planned."""
        plan = self._pending.pop(0)
        step = self.replica.in_flight[0]
        tokens = np.random.default_rng(step.step).integers(2, VOCAB, len(step.rows), dtype=np.int32)
        result = m.ModelRunnerOutput(plan.epoch, plan.step, pack(tokens), plan.digest, b"")
        return e.FromWorker(WORKER, result)

    def deliver(self, result: e.FromWorker) -> list[e.Action]:
        """Commit a result and make the next plan: what is measured as one step."""
        return self.engine.handle(result, 0.0)

    def step(self) -> None:
        """One result, not measured."""
        self._take(self.deliver(self.next_result()))

    def take(self, actions: list[e.Action]) -> None:
        """See what the engine asked for (outside of the measured time)."""
        self._take(actions)

    def _take(self, actions: list[e.Action]) -> None:
        for action in actions:
            match action:
                case e.ToWorker(_, m.SchedulerOutput() as plan):
                    self._pending.append(plan)
                    self.plan = plan
                    self.num_plans += 1
                case e.ToClient(_, m.Finished() as finished):
                    self.finished.append(finished)
                case e.ToClient(_, m.TokenBatch() as batch):
                    self.num_tokens += len(batch.tokens) // 4


def _model(windows: tuple[int, ...]) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_layers=len(windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        layer_windows=windows,
        eos_token_ids=(1,),
    )


def _hello(config: EngineConfig, model: ModelConfig, num_blocks: int) -> m.Hello:
    return m.Hello(
        worker_id="worker-0",
        incarnation="bench",
        replica=0,
        rank=0,
        tp_size=1,
        pid=1,
        model_fingerprint=model.fingerprint,
        block_size=config.block_size,
        groups=model.cache_groups,
        num_blocks=num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_memory_id="bench",
        device="cpu",
        dtype="bfloat16",
        attention_backend="none",
        backend_reason="",
    )
