"""What the prefix cache may give, to whom, and from when on; through the whole engine, with exact counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from protocol.messages import KVCacheGroupSpec, SamplingParams
from protocol.windows import first_live_block
from scheduler.block_hash import cache_key
from scheduler.cache_manager import KVCacheManager
from scheduler.request import Request
from tests.scheduler.deployment import Deployment, greedy


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 64])
def test_a_whole_prompt_cached_still_computes_its_last_token(num_tokens: int) -> None:
    deployment = Deployment(block_size=16, num_blocks=32)
    prompt = list(range(100, 100 + num_tokens))
    for name in ("first", "second"):
        deployment.submit(name, prompt)
        deployment.run()
    assert deployment.cached("first") == 0
    assert deployment.cached("second") == (num_tokens - 1) // 16 * 16
    assert deployment.tokens["first"] == deployment.tokens["second"] == deployment.golden("first")
    deployment.check_idle()


def test_thirty_two_tokens_in_blocks_of_sixteen_hit_sixteen() -> None:
    deployment = Deployment(block_size=16, num_blocks=32)
    for name in ("first", "second"):
        deployment.submit(name, list(range(32)))
        deployment.run()
    assert deployment.cached("second") == 16


def test_an_answer_is_found_by_the_next_turn() -> None:
    deployment = Deployment(num_blocks=32)
    deployment.submit("first", [5, 6, 7], greedy(13))
    deployment.run()
    deployment.submit("second", [5, 6, 7, *deployment.tokens["first"], 9])
    deployment.run()
    assert deployment.cached("second") == 12  # of 16 known tokens 15 were computed, in 3 full blocks
    assert deployment.tokens["second"] == deployment.golden("second")


def test_caching_off_finds_nothing() -> None:
    deployment = Deployment(enable_prefix_caching=False)
    for name in ("first", "second"):
        deployment.submit(name, list(range(20)))
        deployment.run()
    assert deployment.cached("second") == 0


def test_another_salt_shares_nothing() -> None:
    deployment = Deployment()
    for name, salt in (("first", ""), ("second", "x"), ("third", "x")):
        deployment.submit(name, list(range(20)), cache_salt=salt)
        deployment.run()
    assert [deployment.cached(name) for name in ("first", "second", "third")] == [0, 0, 16]


def test_twins_admitted_in_one_plan_share_the_first_ones_blocks() -> None:
    deployment = Deployment(max_num_batched_tokens=64, start=False)
    deployment.submit("first", list(range(20)))
    deployment.submit("second", list(range(20)))
    deployment.start()
    deployment.run()
    assert deployment.cached("second") == 16
    assert deployment.tokens["second"] == deployment.golden("second")


def test_a_twin_of_an_aborted_request_finds_only_the_chunks_already_issued() -> None:
    deployment = Deployment(max_num_batched_tokens=8, max_num_seqs=4, pipeline_depth=1)
    deployment.submit("first", list(range(40)))  # its first chunk of 8 is issued
    deployment.abort("first")
    deployment.submit("second", list(range(40)))
    deployment.run()
    assert deployment.cached("second") == 8
    assert deployment.tokens["second"] == deployment.golden("second")
    deployment.check_idle()


def test_a_twin_of_a_request_whose_worker_died_finds_nothing() -> None:
    deployment = Deployment(max_num_batched_tokens=8, max_num_seqs=4)
    deployment.submit("first", list(range(40)))
    deployment.step()
    deployment.kill()
    deployment.abort("first")
    deployment.submit("second", list(range(40)))
    deployment.start()
    deployment.run()
    assert deployment.cached("second") == 0
    assert deployment.tokens["second"] == deployment.golden("second")


def test_a_restarted_workers_cache_is_empty() -> None:
    deployment = Deployment()
    deployment.submit("first", list(range(40)))
    deployment.run()
    assert deployment.engine.replicas[0].manager.pool.num_cached > 0
    deployment.kill()
    deployment.start()
    assert deployment.engine.replicas[0].manager.pool.num_cached == 0
    deployment.submit("second", list(range(40)))
    deployment.run()
    assert deployment.cached("second") == 0
    assert deployment.tokens["second"] == deployment.golden("second")


# ----------------------------------------------------------------------------------------- need against free blocks


def _request(tokens: list[int]) -> Request:
    prompt = np.array(tokens, dtype=np.int32)
    return Request("r", prompt, SamplingParams(), limit=9999, stop_ids=(), root=b"root", arrival=0)


def _groups(*windows: int) -> tuple[KVCacheGroupSpec, ...]:
    return tuple(KVCacheGroupSpec(window, (place,), 1, 1) for place, window in enumerate(windows))


@pytest.mark.parametrize(("new", "fits"), [(2, True), (3, False)])
def test_hits_without_owner_are_need_too(new: int, fits: bool) -> None:
    """Ten free blocks, all cached; eight of them are hits: with two new ones it fits, with three it does not."""
    manager = KVCacheManager(_groups(0), block_size=1, num_blocks=11)
    old = _request(list(range(10)))
    manager.allocate_slots(old, 10)
    manager.hash_blocks(old, 10)
    manager.publish(old, 0, 10)
    manager.free(old)
    assert manager.pool.num_free == manager.pool.num_cached == 10
    request = _request([*range(8), *range(50, 50 + new)])
    hit = manager.get_computed_blocks(request)
    assert hit.num_blocks == 8 and manager.blocks_to_admit(request, 8 + new, hit) == 8 + new
    assert (manager.allocate_slots(request, 8 + new, hit) is not None) == fits
    assert manager.pool.num_free == (0 if fits else 10)
    manager.check([request] if fits else [])


def test_heads_of_prefixes_live_longest() -> None:
    """Freed with the last positions first: under pressure a cached prefix is shortened from its end."""
    manager = KVCacheManager(_groups(0), block_size=2, num_blocks=6)
    old = _request(list(range(10)))
    manager.allocate_slots(old, 10)
    manager.hash_blocks(old, 5)
    manager.publish(old, 0, 5)
    manager.free(old)
    manager.pool.get_new_blocks(2)
    assert manager.get_computed_blocks(_request(list(range(11)))).num_blocks == 3


# ------------------------------------------------------------------------------------------------ hits over groups


@pytest.mark.parametrize("windows", [(0, 1), (0, 3), (0, 5), (2,), (3, 6), (0, 2, 5)])
def test_a_hit_is_the_longest_length_at_which_every_group_hits(windows: tuple[int, ...]) -> None:
    """Every set of cached blocks of a 5-block prompt in each group, against trying all lengths."""
    size, blocks = 2, 5
    groups = _groups(*windows)
    patterns = list(itertools.product([False, True], repeat=blocks))
    rng = np.random.default_rng(len(windows))
    for first in patterns:
        others = [[patterns[int(rng.integers(len(patterns)))] for _ in windows[1:]] for _ in range(12)]
        for pattern in others if windows[1:] else [[]]:
            manager = KVCacheManager(groups, size, num_blocks=1 + blocks * len(windows))
            request = _request(list(range(size * blocks + 1)))
            manager.hash_blocks(request, blocks)
            for group, cached in enumerate([first, *pattern]):
                for index, present in enumerate(cached):
                    if present:
                        (block,) = manager.pool.get_new_blocks(1)
                        manager.pool.cache_full_block(block, cache_key(request.block_hashes[index], group))
            expected = max(
                length
                for length in range(blocks + 1)
                if all(
                    all(cached[first_live_block(length * size, window, size) if window else 0 : length])
                    for window, cached in zip(windows, [first, *pattern], strict=True)
                )
            )
            hit = manager.get_computed_blocks(request)
            assert hit.num_blocks == expected, (windows, first, pattern)
            for window, table in zip(windows, hit.blocks, strict=True):
                front = first_live_block(expected * size, window, size) if window else 0
                assert [block.is_null for block in table] == [True] * front + [False] * (expected - front)


def test_a_window_group_hits_although_the_head_was_evicted() -> None:
    deployment = Deployment(windows=(4,), block_size=2, num_blocks=10, max_model_len=64)
    deployment.submit("first", list(range(30)), greedy(2))
    deployment.run()
    deployment.submit("second", list(range(30)), greedy(2))
    deployment.run()
    assert deployment.cached("second") == 28
    assert deployment.tokens["second"] == deployment.golden("second")
    deployment.check_idle()
