"""The random load is reproducible, differs between rounds, and shares exactly the prefixes it should."""

from __future__ import annotations

import pytest

from bench.workload import RandomWorkload


def test_a_round_is_reproducible_and_no_prompt_returns_in_another():
    load = RandomWorkload(num_prompts=20, input_len=32, output_len=3)
    assert load.requests(1) == load.requests(1)
    seen = [request.prompt_token_ids for i in range(4) for request in load.requests(i)]
    assert len(set(seen)) == len(seen) == 80
    assert len({prompt[:16] for prompt in seen}) == 80  # not even a first block is shared
    other_seed = RandomWorkload(num_prompts=20, input_len=32, output_len=3, seed=2)
    assert other_seed.requests(1) != load.requests(1)


def test_requests_have_the_shape_that_was_asked_for():
    load = RandomWorkload(num_prompts=5, input_len=7, output_len=3, prefix_len=4, min_token_id=10, max_token_id=12)
    requests = load.requests(1)
    assert [request.index for request in requests] == [0, 1, 2, 3, 4]
    assert all(len(request.prompt_token_ids) == 11 and request.output_len == 3 for request in requests)
    assert {token for request in requests for token in request.prompt_token_ids} == {10, 11}


def test_prompts_take_the_shared_prefixes_in_turn_and_share_nothing_else():
    load = RandomWorkload(num_prompts=6, input_len=16, prefix_len=8, num_prefixes=3)
    requests = load.requests(1)
    prefixes = [request.prompt_token_ids[:8] for request in requests]
    assert prefixes[:3] == prefixes[3:]
    assert len(set(prefixes)) == 3
    assert len({request.prompt_token_ids[8:] for request in requests}) == 6
    assert not set(prefixes) & {request.prompt_token_ids[:8] for request in load.requests(2)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": -1}, "output_len"),
        ({"prefix_len": -1}, "prefix_len"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"min_token_id": 7, "max_token_id": 7}, "token ids"),
    ],
)
def test_a_load_that_can_not_be_is_refused_by_name(change: dict[str, int], named: str):
    with pytest.raises(ValueError, match=named):
        RandomWorkload(**change)
