"""One random history, drawn whole from a seed before it runs: deployment, requests, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from protocol.config import EngineConfig
from protocol.messages import SamplingParams
from protocol.model_config import ModelConfig
from protocol.windows import most_live_blocks
from tests.sim.golden import golden_stream

EOS = 1

Style = Literal["before_run", "while_running", "after_run", "freeze", "run_held_row", "swap_grown_ids"]
"""How a worker fails at a plan: killed before it runs it, while it runs, right after it sent the result (which may
arrive late); stopped (SIGSTOP) for a while; or it misapplies the plan, which its digest must show before it runs."""


@dataclass
class Fault:
    """Worker of `replica` fails at the `plan`-th plan that the replica gets, counted over all its incarnations."""

    replica: int
    plan: int
    style: Style
    notice: bool
    """Whether the supervisor tells the scheduler at once; else it finds out by itself."""
    restart_s: float
    late_s: float
    """How long what the dead worker sent last is on its way."""
    frozen_s: float


@dataclass
class PlannedRequest:
    """A request and what its client does about it."""

    request_id: str
    client: int
    submit_at: float
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    salt: str
    abort_after: int | None = None
    """Abort once so many tokens have arrived (0: right after the submit)."""
    move_after: int | None = None
    """Attach from a new connection once so many tokens have arrived."""


@dataclass
class Scenario:
    """Everything that a history depends on, apart from the latencies, which are drawn from `seed` as it runs."""

    seed: int
    config: EngineConfig
    model: ModelConfig
    num_blocks: list[int]
    """Per replica, the null block included."""
    requests: list[PlannedRequest]
    faults: list[Fault]
    leaves: dict[int, int]
    """client → it leaves without a word once so many tokens have arrived on all its streams together."""
    hold_rate: float
    nan_per_1000: int
    link_s: float
    """Mean latency of a message."""
    step_s: float
    """Mean duration of a step."""
    first_hello_s: list[float] = field(default_factory=list)

    @property
    def windows(self) -> tuple[int, ...]:
        return self.model.windows


def draw(seed: int) -> Scenario:
    """The history of this seed."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 8)
    layer_windows = _layer_windows(rng)
    vocab_size = rng.choice((8, 20, 60))
    max_model_len = rng.choice((16, 28, 40))
    rows = rng.choice((2, 3, 4, 6, 8))
    replicas = rng.choice((1, 1, 1, 2, 2, 3))
    config = EngineConfig(
        workers=replicas,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice((0, 2, 6, 12, 30)),
        enable_prefix_caching=rng.random() < 0.9,
        pipeline_depth=rng.choice((1, 2, 2, 3)),
        watermark=rng.choice((0.0, 0.02, 0.2)),
        heartbeat_interval_s=1.0,
        heartbeat_timeout_s=3.0,
        debug_checks=True,
    )
    nan_per_1000 = rng.choice((0, 0, 0, 0, 20))
    requests = _requests(rng, vocab_size, max_model_len, nan_per_1000)
    num_blocks = _pools(rng, requests, config, layer_windows)
    hold_rate = rng.choice((0.0, 0.0, 0.1, 0.3))
    return Scenario(
        seed=seed,
        config=config,
        model=_model(layer_windows, vocab_size, max_model_len),
        num_blocks=num_blocks,
        requests=requests,
        faults=_faults(rng, replicas, hold_rate),
        leaves={rng.randrange(3): rng.randint(0, 12)} if rng.random() < 0.15 else {},
        hold_rate=hold_rate,
        nan_per_1000=nan_per_1000,
        link_s=rng.choice((0.0001, 0.002, 0.02)),
        step_s=0.01,
        first_hello_s=[rng.choice((0.0, 0.0, 0.05, 0.5)) for _ in range(replicas)],
    )


def _layer_windows(rng: random.Random) -> tuple[int, ...]:
    window = rng.randint(1, 13)
    kind = rng.random()
    if kind < 0.45:
        return (0,)
    if kind < 0.85:
        return (0, window)
    if kind < 0.93:
        return (window,)
    return (0, window, window + rng.randint(1, 6))


def _model(layer_windows: tuple[int, ...], vocab_size: int, max_model_len: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(layer_windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=max_model_len,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        layer_windows=layer_windows,
        eos_token_ids=(EOS,),
    )


def _requests(rng: random.Random, vocab_size: int, max_model_len: int, nan_per_1000: int) -> list[PlannedRequest]:
    longest = max_model_len - 1
    prefixes = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(rng.randint(1, 2))]
    spread = rng.choice((0.0, 0.05, 0.3))
    requests: list[PlannedRequest] = []
    for number in range(rng.randint(3, 9)):
        chance = rng.random() if requests else 1.0
        if chance < 0.3:  # a twin: the same prompt, often at the same time
            model = rng.choice(requests)
            prompt, submit_at = list(model.prompt), rng.choice((model.submit_at, model.submit_at + 0.03))
        elif chance < 0.5:  # the next turn: an earlier prompt with its answer
            model = rng.choice(requests)
            answer = golden_stream(
                model.prompt,
                model.sampling,
                eos_token_ids=(EOS,),
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                nan_per_1000=nan_per_1000,
            ).tokens
            prompt = (model.prompt + answer[: rng.randint(0, len(answer))])[:longest]
            submit_at = model.submit_at + rng.choice((0.05, 0.1, 0.2))
        else:
            shared = rng.choice(prefixes)
            prompt = shared[: rng.randint(0, len(shared))]
            prompt = prompt + [rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 1, 2, 5)))]
            prompt, submit_at = prompt[:longest] or [rng.randrange(vocab_size)], rng.uniform(0, spread)
        max_tokens = rng.choice((1, 2, 3, 5, 8, 8, 12, 40))
        request = PlannedRequest(
            request_id=f"r{number}",
            client=rng.randrange(3),
            submit_at=submit_at,
            prompt=prompt,
            sampling=_sampling(rng, max_tokens, vocab_size),
            priority=rng.choice((0, 0, 0, 1, -1)),
            salt=rng.choice(("", "", "", "", "other")),
        )
        chance = rng.random()
        if chance < 0.1:
            request.abort_after = rng.randint(0, 6)
        elif chance < 0.2:
            request.move_after = rng.randint(0, 6)
        requests.append(request)
    return requests


def _sampling(rng: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    greedy = rng.random() < 0.7
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else rng.getrandbits(64),
        stop_token_ids=tuple(rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 0, 1, 6)))),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice((0, 0, 0, min(2, max_tokens), max_tokens)),
    )


def _pools(
    rng: random.Random, requests: list[PlannedRequest], config: EngineConfig, layer_windows: tuple[int, ...]
) -> list[int]:
    """From half of what the largest request needs to several times that; the tight ones are the interesting ones."""

    def need(num_tokens: int) -> int:
        return sum(most_live_blocks(num_tokens, window, config.block_size) for window in sorted(set(layer_windows)))

    largest = max(need(min(len(r.prompt) + r.sampling.max_tokens, config.max_model_len)) for r in requests)
    factor = rng.choice((0.5, 0.8, 1.0, 1.1, 1.3, 1.6, 2.0, 4.0))
    usable = max(len(set(layer_windows)), round(largest * factor))
    extra = [0] * config.workers if rng.random() < 0.8 else [rng.randint(0, usable) for _ in range(config.workers)]
    return [1 + usable + more for more in extra]


def _faults(rng: random.Random, replicas: int, hold_rate: float) -> list[Fault]:
    styles: tuple[Style, ...] = ("before_run", "while_running", "after_run", "after_run", "freeze", "swap_grown_ids")
    count = rng.choice((0, 0, 1, 1, 2, 3, 4))
    faults = []
    for number in range(count):
        style = "run_held_row" if hold_rate and number == 0 and rng.random() < 0.5 else rng.choice(styles)
        faults.append(
            Fault(
                replica=rng.randrange(replicas),
                plan=rng.randint(1, 16),
                style=style,
                notice=rng.random() < 0.6,
                restart_s=rng.choice((0.0, 0.05, 0.5, 4.0)),
                late_s=rng.choice((0.0, 0.02, 1.0)),
                frozen_s=rng.choice((0.5, 5.0)),
            )
        )
    return faults
