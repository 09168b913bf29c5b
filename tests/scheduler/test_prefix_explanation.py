"""What is said about a prefix is what an admission then finds, and the reason given is what really happened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack
from scheduler import events as e
from scheduler.eviction_memory import EvictionMemory
from tests.scheduler.deployment import Deployment, greedy


def explain(deployment: Deployment, prompt: list[int], salt: str = "") -> m.PrefixExplanation:
    actions = deployment.handle(e.FromClient(b"asker", m.ExplainPrefix("q", pack(prompt), salt)))
    (answer,) = [action.message for action in actions if isinstance(action, e.ToClient)]
    assert isinstance(answer, m.PrefixExplanation)
    received = codec.scheduler_to_client.decode(codec.encode(answer))
    assert received == answer and answer.query_id == "q"
    return answer


def run(deployment: Deployment, name: str, prompt: list[int], max_tokens: int = 1, **more: str) -> None:
    deployment.submit(name, prompt, greedy(max_tokens=max_tokens), **more)
    deployment.run()


def missing(group: m.GroupPrefix) -> tuple[int, int, int, str]:
    return group.missing_block, group.missing_first_token, group.missing_last_token, group.reason


PROMPT = list(range(2, 20))  # 18 tokens: 4 full blocks of 4


def test_before_anything_ran_nothing_was_ever_stored() -> None:
    found = explain(Deployment(), PROMPT)
    assert (found.num_tokens, found.block_size, found.most_blocks) == (18, 4, 4)
    (replica,) = found.replicas
    assert (replica.state, replica.hit_blocks, replica.hit_tokens) == ("ready", 0, 0)
    assert missing(replica.groups[0]) == (0, 0, 3, "never_stored")


def test_a_prompt_that_ran_hits_whole_and_one_that_branches_off_up_to_the_branch() -> None:
    deployment = Deployment()
    run(deployment, "a", PROMPT)
    (replica,) = explain(deployment, PROMPT).replicas
    assert (replica.hit_blocks, replica.hit_tokens) == (4, 16)
    assert missing(replica.groups[0]) == (-1, -1, -1, "")
    branch = [*PROMPT[:9], 500, *PROMPT[10:]]
    (replica,) = explain(deployment, branch).replicas
    assert replica.hit_tokens == 8
    assert missing(replica.groups[0]) == (2, 8, 11, "never_stored")
    assert explain(deployment, PROMPT, "another salt").replicas[0].hit_blocks == 0


def test_the_last_token_is_computed_in_any_case() -> None:
    deployment = Deployment()
    run(deployment, "a", PROMPT[:16])
    found = explain(deployment, PROMPT[:16])
    assert (found.most_blocks, found.replicas[0].hit_tokens) == (3, 12)
    assert explain(deployment, PROMPT[:4]).most_blocks == 0


def test_a_block_that_was_evicted_is_told_from_one_that_never_was() -> None:
    deployment = Deployment(num_blocks=9)
    run(deployment, "a", PROMPT)
    run(deployment, "b", [*range(100, 123)])  # 6 of 8 blocks: what "a" published last goes first
    (replica,) = explain(deployment, PROMPT).replicas
    index, _, _, reason = missing(replica.groups[0])
    assert reason == "evicted" and index == replica.hit_blocks < 4
    (replica,) = explain(deployment, [*PROMPT[:8], *range(300, 310)]).replicas
    assert replica.groups[0].reason in ("evicted", "never_stored")
    assert explain(deployment, [*range(400, 410)]).replicas[0].groups[0].reason == "never_stored"


def test_what_died_with_its_worker_is_said_to_be_lost() -> None:
    deployment = Deployment(replicas=2)
    run(deployment, "a", PROMPT)
    holder = next(r.replica for r in explain(deployment, PROMPT).replicas if r.hit_blocks == 4)
    deployment.kill(holder)
    down = explain(deployment, PROMPT).replicas[holder]
    assert (down.state, down.hit_blocks, down.groups[0].reason) == ("down", 0, "lost")
    deployment.start(holder)
    back = explain(deployment, PROMPT).replicas
    assert [replica.groups[0].reason for replica in back] == [
        "lost" if replica.replica == holder else "never_stored" for replica in back
    ]


def test_a_block_that_a_running_request_computes_is_on_its_way() -> None:
    deployment = Deployment(max_num_batched_tokens=8, pipeline_depth=1)
    deployment.submit("a", PROMPT, greedy(max_tokens=2))
    (replica,) = explain(deployment, PROMPT).replicas
    assert replica.hit_tokens == 8, "its first chunk is issued"
    assert missing(replica.groups[0]) == (2, 8, 11, "computing")


def test_with_caching_off_that_is_the_reason() -> None:
    deployment = Deployment(enable_prefix_caching=False)
    run(deployment, "a", PROMPT)
    (replica,) = explain(deployment, PROMPT).replicas
    assert (replica.enabled, replica.hit_blocks, replica.groups[0].reason) == (False, 0, "disabled")


def test_results_without_value_are_withdrawn() -> None:
    deployment = Deployment(nan_per_1000=1000)
    run(deployment, "a", PROMPT)
    assert deployment.finished["a"].reason == "error"
    assert explain(deployment, PROMPT).replicas[0].groups[0].reason == "withdrawn"


@pytest.mark.parametrize("prompt", [[], [10**6], [5] * 300])
def test_a_prompt_that_could_not_run_is_rejected_with_the_question_named(prompt: list[int]) -> None:
    deployment = Deployment()
    deployment.handle(e.FromClient(b"asker", m.ExplainPrefix("q", pack(prompt))))
    assert deployment.rejected["q"].param == "token_ids"


def test_the_question_touches_nothing() -> None:
    deployment = Deployment(num_blocks=9)
    run(deployment, "a", PROMPT)
    pool = deployment.engine.replicas[0].manager.pool
    before = [block.block_id for block in pool.free_queue], bytes(pool.states), len(pool.evicted)
    for _ in range(3):
        explain(deployment, PROMPT)
    assert ([block.block_id for block in pool.free_queue], bytes(pool.states), len(pool.evicted)) == before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_foretold_is_what_the_admission_finds(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(0,), (0, 6), (5,), (0, 3, 9)]))
    deployment = Deployment(windows=windows, num_blocks=data.draw(st.integers(20, 60)), vocab_size=8)
    tokens = st.lists(st.integers(2, 3), min_size=1, max_size=26)
    for number in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(tokens)
        foretold = explain(deployment, prompt).replicas[0]
        run(deployment, f"r{number}", prompt, data.draw(st.integers(1, 3)))
        assert deployment.cached(f"r{number}") == foretold.hit_tokens
        assert foretold.hit_blocks <= min(group.hit_blocks for group in foretold.groups)
        if len(windows) == 1:
            assert foretold.hit_blocks == foretold.groups[0].hit_blocks
        for group in foretold.groups:
            assert group.missing_block in (-1, group.hit_blocks)
            assert (group.reason == "") == (group.missing_block == -1)


def test_the_memory_of_the_evicted_is_bounded_and_says_when_it_forgot() -> None:
    memory = EvictionMemory(most=3)
    for key in (b"a", b"b", b"c"):
        memory.add(key, "evicted")
    assert not memory.overflowed
    memory.add(b"a", "lost")  # becomes the newest
    memory.add(b"d", "evicted")
    assert (len(memory), memory.overflowed) == (3, True)
    assert [memory.why(key) for key in (b"a", b"b", b"c", b"d")] == ["lost", None, "evicted", "evicted"]
    memory.add_all([b"1", b"2", b"3", b"4"], 4, "lost")
    assert [memory.why(key) for key in (b"1", b"2", b"3", b"4")] == [None, "lost", "lost", "lost"]


def test_who_asks_too_late_is_told_that_it_is_not_known() -> None:
    deployment = Deployment(num_blocks=9)
    deployment.engine.replicas[0].evicted.overflowed = True
    assert explain(deployment, PROMPT).replicas[0].groups[0].reason == "unknown"
