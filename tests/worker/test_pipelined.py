"""The runner for a GPU, on a device that is always behind: the tokens of the plain runner, and the same bits."""

from __future__ import annotations

import functools
import random
import re
import select
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernels.backend import AttentionBackend
from kernels.selector import Selection
from kernels.torch_backend import TorchBackend
from protocol import messages as m
from protocol.arrays import unpack
from protocol.config import EngineConfig
from tests.tiny_model import tiny_model
from tests.worker.late_device import LateDevice
from tests.worker.recordable import MappingBackend, RecordableBackend
from tests.worker.serving import Serving, config_of, greedy
from worker.batch import DigestMismatch, InputBatch, PlanError, StepInputs
from worker.kernel_calls import KernelCalls
from worker.padding import graph_sizes
from worker.pipelined import PipelinedRunner
from worker.runner import ModelRunner
from worker.staging import StagingRing

BLOCK_BYTES = 8 * 512
"""8 slots of K and V of 2 layers (of a group) of 2 heads of 16 float32."""


@pytest.fixture(autouse=True)
def as_in_a_worker() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """make(class, config, backend, **more) → a runner over that backend, warmed up; all are closed at the end."""
    made: list[ModelRunner] = []

    def build(kind: type[ModelRunner], config: EngineConfig, backend: AttentionBackend, **more: Any) -> ModelRunner:
        monkeypatch.setattr("worker.runner.select_backend", lambda *_, **__: Selection(backend, "for the test", {}))
        runner = kind(config, 1, **more)
        made.append(runner)
        runner.warm_up()
        return runner

    yield build
    for runner in made:
        runner.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(256), k=length)


def sampling_of(number: int) -> m.SamplingParams:
    """Greedy and drawn ones, of different lengths, some with stop tokens, penalties or a grammar: rows join and leave
    all the time, and a row that asks for much follows one that asks for nothing."""
    if number % 3 == 0:
        return greedy(5 + number % 14, **({"frequency_penalty": 1.5, "min_tokens": 3} if number % 2 else {}))
    stops = tuple(range(64)) if number % 3 == 1 else ()
    logprobs = {"logprobs": 2, "prompt_logprobs": 1} if number % 4 == 0 else {}
    return m.SamplingParams(
        max_tokens=4 + number % 17, temperature=0.8, top_p=0.9 if number % 2 else 1.0, top_k=number % 5 * 10,
        seed=number, ignore_eos=True, stop_token_ids=stops, **logprobs,
        structured_outputs=m.StructuredOutputsParams(regex="([a-c]{1,3}[0-9];){9}") if number % 5 == 2 else None,
    )  # fmt: skip


def play(serving: Serving, num_requests: int = 24) -> dict[str, list[int]]:
    """A history: requests arrive in clumps while others run, one is aborted, and in the middle the worker restarts."""
    for number in range(num_requests):
        serving.submit(f"r{number}", prompt_of(1 + number * 7 % 60, number), sampling_of(number))
        if number % 5 == 4:
            for _ in range(number % 4 * 3):
                serving.step()
        if number == 15:
            serving.abort("r15")
        if number == 17:
            serving.hello()
    serving.run()
    tokens = dict(serving.tokens)
    del tokens["r15"]
    return tokens


@functools.cache
def plain_tokens(kind: str, kv_memory: str) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.runner.select_backend", lambda *_, **__: Selection(TorchBackend(), "for the test", {}))
        return play(Serving(ModelRunner(config_of(tiny_model(kind), kv_memory=kv_memory), 1)))


@pytest.mark.parametrize(
    ("kind", "num_blocks", "progress", "eager"),
    [
        ("llama", 24, 0.0, False),
        ("mixed", 24, 0.6, False),
        ("mixed", 400, 0.95, False),
        ("mixed", 24, 0.6, True),
        ("llama", 400, 0.0, True),
    ],
)
def test_the_tokens_are_those_of_the_plain_runner(
    make: Any, kind: str, num_blocks: int, progress: float, eager: bool
) -> None:
    """Prefill and decode mixed, chunks, preemption (24 blocks), an abort, a restart, a sliding window."""
    kv_memory = str(num_blocks * BLOCK_BYTES)
    config = config_of(tiny_model(kind), kv_memory=kv_memory, enforce_eager=eager)
    runner = make(PipelinedRunner, config, RecordableBackend(), make_device=lambda _: LateDevice(progress))
    serving = Serving(runner)
    assert play(serving) == plain_tokens(kind, kv_memory)
    [replica] = serving.engine.replicas
    assert (replica.stats.preemptions > 0) is (num_blocks == 24)
    assert (runner.replays > 10) is not eager
    assert runner.uploader.ring.waits == 0, "three buffers are enough for two steps"


def test_with_a_single_buffer_the_host_waits_for_the_device(make: Any) -> None:
    """However few buffers there are, none is rewritten before the device has read it; see LateDevice."""
    device = LateDevice(0.3)
    config = config_of(tiny_model("mixed"), kv_memory=str(24 * BLOCK_BYTES))
    runner = make(PipelinedRunner, config, RecordableBackend(), make_device=lambda _: device)
    runner.uploader.ring = StagingRing(device, 1)
    assert play(Serving(runner)) == plain_tokens("mixed", config.kv_memory)
    assert runner.uploader.ring.waits > 0


Placed = tuple[list[int], list[list[int]]]
"""Of each token its position; and, per cache group, its slot."""


def placed_by(runner: PipelinedRunner) -> list[Placed]:
    """What the model is told in each step from now on. Nothing of it may have been uploaded."""
    seen: list[Placed] = []
    forward, send, layer_of = runner.model.forward, runner.uploader.send, runner._group_of.index

    def spy_forward(input_ids: torch.Tensor, positions: torch.Tensor, caches: Any, metadata: Any, *more: Any) -> Any:
        slots = [metadata[layer_of(group)].slot_mapping for group in range(len(runner.tables))]
        seen.append((positions.tolist(), [of_group.tolist() for of_group in slots]))
        return forward(input_ids, positions, caches, metadata, *more)

    def spy_send(step: StepInputs, inputs: Any) -> Any:
        assert {"positions", "slots.0"}.isdisjoint(inputs)
        return send(step, inputs)

    runner.model.forward, runner.uploader.send = spy_forward, spy_send  # type: ignore[method-assign]
    return seen


def steps_of(plans: list[m.SchedulerOutput], batch: InputBatch) -> Iterator[StepInputs]:
    """What the host makes of the plans, slots included."""
    for plan in plans:
        if plan.epoch != batch.epoch:
            batch.start_epoch(plan.epoch)
        step = batch.apply(plan)
        batch.expect_sampled(step.rows[step.sampling])
        yield step


@pytest.mark.parametrize(("num_blocks", "eager"), [(24, False), (400, True)], ids=["recorded", "eager"])
def test_slots_made_on_the_device_are_those_of_the_host(make: Any, num_blocks: int, eager: bool) -> None:
    """In prefill, chunks, mixed batches and decode, with a sliding window; padding of a recorded size gets none."""
    kv_memory = str(num_blocks * BLOCK_BYTES)
    config = config_of(tiny_model("mixed"), kv_memory=kv_memory, enforce_eager=eager)
    backend = MappingBackend()
    runner = make(PipelinedRunner, config, backend, make_device=lambda _: LateDevice(0.6))
    windows, seen, before = runner.model_config.windows, placed_by(runner), backend.counters["slot_mapping"]
    assert len(windows) == 2 and any(windows)
    serving = Serving(runner)
    assert play(serving) == plain_tokens("mixed", kv_memory)
    batch = InputBatch(config.max_num_seqs, config.max_model_len, windows, config.block_size)
    padded = mixed = 0
    for (positions, slots), step in zip(seen, steps_of(serving.plans, batch), strict=True):
        tokens, rows = len(step.input_ids), len(step.rows)
        decodes = not eager and tokens == rows
        more = min(size for size in graph_sizes(config.max_num_seqs) if size >= rows) - rows if decodes else 0
        assert positions == [*step.positions.tolist(), *[0] * more]
        assert slots == [[*of_group.tolist(), *[-1] * more] for of_group in step.slot_mapping]
        padded += more > 0
        mixed += rows < tokens and bool((np.diff(step.query_start_loc) == 1).any())
    assert mixed > 3 and (padded > 3) is not eager
    assert backend.counters["slot_mapping"] - before == len(serving.plans)


def spied(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits of each step from now on."""
    seen: list[torch.Tensor] = []
    draw = runner._draw

    def spy(rows: np.ndarray, logits: torch.Tensor) -> Any:
        seen.append(logits.clone())
        return draw(rows, logits)

    runner._draw = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("room", [0, 100, 1 << 30], ids=["eager", "some recorded", "recorded"])
def test_the_same_plans_give_the_same_bits(make: Any, room: int) -> None:
    config = config_of(tiny_model("mixed"), enforce_eager=room == 0)
    plain = make(ModelRunner, config, TorchBackend())
    expected, serving = spied(plain), Serving(plain)
    play(serving)
    backend = RecordableBackend(room)
    runner = make(PipelinedRunner, config, backend, make_device=lambda _: LateDevice(0.6))
    seen = spied(runner)
    outputs: list[m.ModelRunnerOutput] = []
    runner.start_epoch(serving.plans[0].epoch)
    for plan in serving.plans:
        if plan.epoch != runner.batch.epoch:
            runner.flush(outputs.append)
            runner.start_epoch(plan.epoch)
        runner.submit(plan, outputs.append)
    runner.flush(outputs.append)
    assert [output.tokens for output in outputs] == [output.tokens for output in serving.outputs]
    assert [output.digest for output in outputs] == [output.digest for output in serving.outputs]
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = ([getattr(o, name) for o in all_outputs] for all_outputs in (outputs, serving.outputs))
        assert any(theirs) and [bool(report) for report in ours] == [bool(report) for report in theirs]
        assert runner.replays or ours == theirs
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        # products of a padded batch may be summed in another order, as between any two batch sizes
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 if runner.replays else 0)
    assert (runner.replays > 0, backend.refused > 0) == (room > 0, room == 100)


def test_a_grammar_knows_every_token_before_the_next_draw(make: Any) -> None:
    """Its mask is made after the result of the step before is in, though the model has been enqueued already."""
    shape = m.StructuredOutputsParams(regex="(ab|cd)+[0-9]{3}x")
    tokens = []
    for runner in (
        make(ModelRunner, config_of(tiny_model()), TorchBackend()),
        make(PipelinedRunner, config_of(tiny_model()), RecordableBackend(), make_device=lambda _: LateDevice(0.3)),
    ):
        serving = Serving(runner)
        for number in range(6):
            sampling = m.SamplingParams(
                max_tokens=14, temperature=0.9, seed=number, structured_outputs=shape if number % 2 else None
            )
            serving.submit(str(number), prompt_of(4 + number), sampling)
        serving.run()
        tokens.append(serving.tokens)
    assert tokens[0] == tokens[1]
    for name in "135":
        text = bytes(token for token in tokens[1][name] if token < 256)
        assert re.fullmatch(rb"(ab|cd)+[0-9]{3}x", text), text


def test_a_refused_plan_comes_after_the_result_before_it(make: Any) -> None:
    """The planes disagree: nothing of that plan runs, the step in flight counts, and a new epoch starts afresh."""
    runner = make(PipelinedRunner, config_of(tiny_model()), RecordableBackend(), make_device=lambda _: LateDevice(0.0))
    serving = Serving(runner)
    serving.submit("a", prompt_of(5), greedy(6))
    assert serving.step() and not serving.outputs
    plan = serving._waiting[0]
    results: list[m.ModelRunnerOutput] = []
    with pytest.raises(DigestMismatch):
        runner.submit(with_digest(plan, plan.digest ^ 1), results.append)
    assert results == []
    runner.flush(results.append)
    assert [(result.step, len(unpack(result.tokens))) for result in results] == [(0, 1)]
    with pytest.raises(PlanError, match="expected 0 step 2"):
        runner.submit(plan, results.append)
    serving.hello()
    serving.run()
    assert len(serving.tokens["a"]) == 6


def with_digest(plan: m.SchedulerOutput, digest: int) -> m.SchedulerOutput:
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return m.SchedulerOutput(**{**fields, "digest": digest})


def test_a_row_without_finite_logits_fails_alone(make: Any) -> None:
    """Its token is -1, the scheduler ends that request, and the row beside it goes on as if alone."""
    runner = make(PipelinedRunner, config_of(tiny_model()), RecordableBackend(), make_device=lambda _: LateDevice(0.3))
    draw, steps = runner._draw, []

    def break_the_first_row(rows: np.ndarray, logits: torch.Tensor) -> Any:
        steps.append(len(rows))
        if len(steps) == 4 and len(rows) == 2:
            logits[0, 7] = float("nan")
        return draw(rows, logits)

    runner._draw = break_the_first_row
    serving = Serving(runner)
    serving.submit("broken", prompt_of(5), greedy(9))
    serving.submit("whole", prompt_of(6), greedy(9))
    serving.run()
    assert serving.finished["broken"].reason == "error"
    alone = Serving(make(ModelRunner, config_of(tiny_model()), TorchBackend()))
    alone.submit("whole", prompt_of(6), greedy(9))
    alone.run()
    assert serving.tokens["whole"] == alone.tokens["whole"]
    assert 0 < len(serving.tokens["broken"]) < 9


def test_a_result_is_announced_and_taken_without_waiting(make: Any) -> None:
    device = LateDevice(0.0)
    runner = make(PipelinedRunner, config_of(tiny_model()), RecordableBackend(), make_device=lambda _: device)
    serving = Serving(runner)
    serving.submit("a", prompt_of(5), greedy(1))
    assert serving.step()
    results: list[m.ModelRunnerOutput] = []
    runner.take_ready(results.append)
    assert results == [] and not select.select([runner.ready_fd], [], [], 0)[0]
    device.pass_until(runner._flight.arrived.item)
    assert select.select([runner.ready_fd], [], [], 10)[0]
    runner.take_ready(results.append)
    assert [result.step for result in results] == [0]
    assert not select.select([runner.ready_fd], [], [], 0)[0]


def test_each_result_comes_with_the_calls_of_its_own_step(make: Any) -> None:
    """Two layers, so two calls of each kernel in every step: also where a replay calls no Python that could count, and
    though the next step is enqueued when a result is delivered."""
    runner = make(PipelinedRunner, config_of(tiny_model()), RecordableBackend())
    serving = Serving(runner)
    serving.submit("a", prompt_of(5), greedy(6))
    calls = KernelCalls()
    calls.start(runner.counters)
    serving.deliver = lambda output: Serving.deliver(serving, calls.add_to(output, runner.counters))
    serving.run()
    assert runner.replays >= 5
    assert [o.kernel_calls for o in serving.outputs] == [{"write_kv": 2, "paged_attention": 2}] * len(serving.plans)


def test_timings_are_those_of_the_step(make: Any) -> None:
    """[apply, commit, forward, sample, idle before], on a device whose clock counts its items of work."""
    runner = make(PipelinedRunner, config_of(tiny_model()), RecordableBackend(), make_device=lambda _: LateDevice())
    serving = Serving(runner)
    serving.submit("a", prompt_of(5), greedy(6))
    serving.run()
    for output in serving.outputs:
        apply, commit, forward, sampling, idle = unpack(output.timings_us).tolist()
        assert apply >= 0 and commit >= 0
        assert (forward, sampling) == (1, 1)
        assert idle >= 2, "an upload and its mark"
