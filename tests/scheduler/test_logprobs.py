"""Log-probabilities reach the client that asked, each once and with its token, whatever happens to the worker."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.logprobs import Logprobs, TokenLogprobs, lists_of
from scheduler import events as e
from scheduler.outbox import Outbox
from tests.scheduler.deployment import Deployment, greedy
from worker.batch import StepInputs


def told_of(token: int, position: int, count: int) -> TokenLogprobs:
    """What the simulated model says of a token: a function of token and position."""
    top = tuple((position + i, -float(i)) for i in range(count - 1))
    return TokenLogprobs(token, -float(token) / 8 - position, 1 + position % 5, top)


def packed(places: list[TokenLogprobs | None]) -> m.LogprobsLists:
    flat = [c for place in places if place for c in ((place.token_id, place.logprob), *place.top)]
    return lists_of(
        np.array([1 + len(place.top) if place else 0 for place in places]),
        np.array([place.rank if place else 0 for place in places]),
        np.array([token for token, _ in flat], dtype=np.int64),
        np.array([value for _, value in flat], dtype=np.float32),
    )


class Reporting(Deployment):
    """Its workers report what is asked for; `told` and `prompts_told` hold what clients were told."""

    def __init__(self, **settings: Any):
        self.told: dict[str, list[TokenLogprobs | None]] = defaultdict(list)
        self.prompts_told: dict[str, list[TokenLogprobs | None]] = defaultdict(lambda: [None])
        self.reported = 0
        """Prompt tokens that workers reported on."""
        super().__init__(**settings)

    def run_plan(self, replica: int = 0) -> m.ModelRunnerOutput:
        worker = self.worker(replica)
        batch, seen = worker.batch, list[StepInputs]()
        apply = batch.apply
        batch.apply = lambda plan: seen.append(apply(plan)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
        result = super().run_plan(replica)
        del batch.apply
        inputs, tokens = seen[0], unpack(result.tokens).tolist()
        rows = inputs.rows[inputs.sampling].tolist()
        counts = batch.num_logprobs[rows].tolist()
        places = [
            told_of(token, int(batch.num_tokens[row]) - 1, count) if count else None
            for row, token, count in zip(rows, tokens, counts, strict=True)
        ]
        prompts = []
        for part in batch.reported_prompts(inputs):
            positions = range(part.start + 1, part.start + 1 + part.num_tokens)
            count = int(batch.num_prompt_logprobs[part.row])
            of_prompt = [told_of(int(batch.token_ids[part.row, p]), p, count) for p in positions]
            prompts.append(m.PromptLogprobs(part.row, part.start + 1, packed(list(of_prompt))))
            self.reported += part.num_tokens
        result = m.ModelRunnerOutput(
            result.epoch,
            result.step,
            result.tokens,
            result.digest,
            b"",
            packed(places) if any(counts) else None,
            prompt_logprobs=tuple(prompts),
        )
        self.results[worker.identity][-1] = result
        return result

    def _to_client(self, identity: bytes, message: m.SchedulerToClient) -> None:
        super()._to_client(identity, message)
        if isinstance(message, m.TokenBatch):
            handles = unpack(message.handles).tolist()
            told = Logprobs(message.logprobs) if message.logprobs else None
            assert told is None or len(told) == len(handles)
            for place, handle in enumerate(handles):
                self.told[self._names[identity, handle]].append(told.at(place) if told else None)
        if isinstance(message, m.PromptLogprobsBatch):
            name = self._names[identity, message.handle]
            assert not self.tokens[name], "the prompt is told before the first token"
            assert message.start == len(self.prompts_told[name])
            part = Logprobs(message.logprobs)
            self.prompts_told[name] += [part.at(place) for place in range(len(part))]

    def expected(self, name: str, count: int) -> list[TokenLogprobs]:
        prompt, _ = self.prompts[name]
        return [told_of(token, len(prompt) + i, count) for i, token in enumerate(self.golden(name))]

    def expected_prompt(self, name: str, count: int) -> list[TokenLogprobs | None]:
        prompt, _ = self.prompts[name]
        return [None, *(told_of(token, i, count) for i, token in enumerate(prompt) if i)]

    def check_all_told(self) -> None:
        for name, (_, sampling) in self.prompts.items():
            if sampling.logprobs is None:
                assert set(self.told[name]) == {None}
            else:
                assert self.told[name] == self.expected(name, 1 + sampling.logprobs)
            if sampling.prompt_logprobs is None:
                assert self.prompts_told[name] == [None]
            else:
                assert self.prompts_told[name] == self.expected_prompt(name, 1 + sampling.prompt_logprobs)
        self.check_idle()


def submit_mixed(deployment: Reporting, length: int = 20) -> None:
    for i, options in enumerate(({}, {"logprobs": 2}, {"prompt_logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 3})):
        deployment.submit(f"r{i}", [(7 * i + j) % 90 + 2 for j in range(length + i)], greedy(10, **options))


def test_everyone_is_told_what_was_asked() -> None:
    deployment = Reporting()
    submit_mixed(deployment)
    deployment.run()
    deployment.check_all_told()


@pytest.mark.parametrize("steps", range(1, 14))
def test_a_death_repeats_and_loses_none(steps: int) -> None:
    """Prompts of several chunks; the worker dies after so many results, others under way."""
    deployment = Reporting(max_num_batched_tokens=16)
    submit_mixed(deployment)
    for _ in range(steps):
        if not deployment.plans[deployment.worker().identity]:
            break
        deployment.step()
    deployment.kill()
    deployment.start()
    deployment.run()
    deployment.check_all_told()


def test_a_prompt_that_was_told_is_not_computed_again_for_it() -> None:
    deployment = Reporting(replicas=1)
    deployment.submit("r", list(range(2, 42)), greedy(10, prompt_logprobs=1))
    deployment.step()
    assert deployment.reported == 39
    deployment.kill()
    deployment.start()
    deployment.run()
    assert deployment.reported == 39
    deployment.check_all_told()


def test_preemption_repeats_and_loses_none() -> None:
    deployment = Reporting(num_blocks=14, max_num_batched_tokens=8)
    for i in range(5):
        deployment.submit(f"r{i}", [i + 2] * 12, greedy(16, logprobs=1, prompt_logprobs=1))
    deployment.run()
    assert deployment.engine.replicas[0].stats.preemptions > 0
    deployment.check_all_told()


def test_a_cached_prompt_is_computed_anew_for_its_logprobs_and_only_for_them() -> None:
    deployment = Reporting()
    prompt = list(range(2, 42))
    for name, sampling in (("a", greedy(4)), ("b", greedy(4, prompt_logprobs=0)), ("c", greedy(4, logprobs=3))):
        deployment.submit(name, prompt, sampling)
        deployment.run()
    assert [deployment.cached(name) for name in "abc"] == [0, 0, 36]
    deployment.check_all_told()


def test_a_client_that_attaches_is_told_again() -> None:
    deployment = Reporting()
    deployment.submit("r", list(range(2, 22)), greedy(8, logprobs=1, prompt_logprobs=1))
    for _ in range(4):
        deployment.step()
    known = len(deployment.tokens["r"])
    assert 0 < known < 8
    deployment.tokens["r"], deployment.told["r"] = [], []
    del deployment.prompts_told["r"]
    deployment.handle(e.FromClient(b"other", m.Attach("r", 0)))
    assert len(deployment.told["r"]) == known
    deployment.run()
    deployment.check_all_told()


def test_batches_that_wait_for_a_slow_client_keep_what_is_told_with_each_token() -> None:
    outbox = Outbox()
    told = [None, told_of(7, 3, 2), None, told_of(9, 4, 1)]
    for index, place in enumerate(told):
        lists = None if place is None else packed([place])
        outbox.add(b"slow", m.TokenBatch(index, pack([1]), pack([index]), pack([7]), lists))
    batch = outbox.first(b"slow")
    assert isinstance(batch, m.TokenBatch) and batch.logprobs is not None
    assert [Logprobs(batch.logprobs).at(place) for place in range(4)] == told


@pytest.mark.parametrize(
    "bad",
    [
        {"logprobs": m.LogprobsLists(b"", b"", b"", b"")},
        {"logprobs": m.LogprobsLists(pack([1]), pack([1]), b"", b"")},
        {"prompt_logprobs": (m.PromptLogprobs(5, 1, packed([told_of(1, 1, 1)])),)},
        {"prompt_logprobs": (m.PromptLogprobs(0, 9, packed([told_of(1, 1, 1)])),)},
        {"prompt_logprobs": (m.PromptLogprobs(0, 3, packed([told_of(1, 1, 1)])),)},
        {"prompt_logprobs": (m.PromptLogprobs(0, 0, packed([told_of(1, 1, 1)])),)},
    ],
    ids=str,
)
def test_a_worker_that_reports_nonsense_is_fenced(bad: dict[str, Any]) -> None:
    deployment = Reporting()
    deployment.submit("r", [2, 3, 4, 5], greedy(4, logprobs=0, prompt_logprobs=0))
    result = deployment.run_plan()
    fields = {name: getattr(result, name) for name in result.__struct_fields__} | bad
    worker = deployment.worker()
    deployment.results[worker.identity].clear()
    actions = deployment.handle(e.FromWorker(worker.identity, m.ModelRunnerOutput(**fields)))
    assert any(isinstance(action, e.WriteFlightRecord) for action in actions)
    deployment.plans.clear()
    deployment.start()
    deployment.run()
    deployment.check_all_told()
