"""The oracle, held against hand calculations and a dense computation: who else would?"""

from __future__ import annotations

import pytest
import torch
from paged_world import make_queries, make_world

from kernels import reference
from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata


def test_slots_of_positions_by_hand() -> None:
    assert [reference.slot_of([7, 3, 11], p, 4) for p in (0, 3, 4, 8, 9)] == [28, 31, 12, 44, 45]
    assert [reference.slot_of([5, 2], p, 16) for p in (15, 16, 23)] == [95, 32, 39]
    metadata = AttentionMetadata.build([10], [10], [[7, 3, 11]], 4)
    assert metadata.slot_mapping.tolist() == [28, 29, 30, 31, 12, 13, 14, 15, 44, 45]


def test_attention_by_hand() -> None:
    """Two keys with scores ln 3 and 0 weigh 3/4 and 1/4."""
    q = torch.tensor([3.0]).log().double()
    keys, values = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[8.0], [4.0]]).double()
    torch.testing.assert_close(reference.attend(q, keys, values, 1.0, None), torch.tensor([7.0]).double())
    assert reference.attend(q, keys[:0], values[:0], 1.0, None).tolist() == [0.0]
    capped = reference.attend(torch.tensor([1e4]).double(), keys, values, 1.0, 50.0)
    torch.testing.assert_close(capped, torch.tensor([8.0]).double())


def test_paged_equals_dense() -> None:
    """Against PyTorch's own attention over K and V that were never paged."""
    lens = [9, 4]
    world = make_world(lens, heads=(4, 2), head_dim=16, block_size=4, dtype=torch.float32)
    metadata = world.metadata(lens)
    q = make_queries(world, 13)
    result = world.expected(q, metadata)
    for s, (begin, n) in enumerate([(0, 9), (9, 4)]):
        dense = []
        for cache in (world.k_cache, world.v_cache):
            pages = [cache[world.tables[s][p // 4], :, p % 4] for p in range(n)]
            dense.append(torch.stack(pages, 1).double()[None])
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[begin : begin + n].double().transpose(0, 1)[None], *dense, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(result[begin : begin + n], wanted[0].transpose(0, 1))


def test_bad_values_are_refused() -> None:
    world = make_world([9], heads=(2, 1), head_dim=16, block_size=4, dtype=torch.float32)
    q = make_queries(world, 1)
    metadata = world.metadata([1])
    metadata.block_table[0, 1] = 99
    with pytest.raises(ValueError, match="outside of the cache"):
        world.expected(q, metadata)
    metadata = world.metadata([1])
    metadata.query_start_loc[0] = 1
    with pytest.raises(ValueError, match="must ascend from 0"):
        world.expected(q, metadata)
    with pytest.raises(ValueError, match="token 0 has slot 99"):
        reference.write_kv(q[:, :1], q[:, :1], world.k_cache, world.v_cache, torch.tensor([99]))


def broken_calls() -> dict:
    """What no backend accepts: name → (changes to the arguments, part of the message)."""
    metadata = AttentionMetadata.build([1], [3], [[1]], 4)
    big = AttentionMetadata.build([1], [20], [[1, 1, 1, 1, 1]], 4)
    short = AttentionMetadata(
        big.query_start_loc, big.seq_lens, metadata.block_table, big.slot_mapping, 1, big.max_seq_len, 1, 1
    )
    int8 = torch.zeros((2, 2, 4, 16), dtype=torch.int8)
    return {
        "heads": ({"q": torch.zeros(1, 3, 16), "out": torch.zeros(1, 3, 16)}, "cannot share 2 KV heads"),
        "head_dim": ({"q": torch.zeros(1, 4, 32), "out": torch.zeros(1, 4, 32)}, "head_dim 32"),
        "out": ({"out": torch.zeros(1, 4, 32)}, "must be alike"),
        "tokens": ({"q": torch.zeros(0, 4, 16), "out": torch.zeros(0, 4, 16)}, "has 0 tokens"),
        "table": ({"metadata": short}, "cannot hold 20 tokens"),
        "caches": ({"v_cache": torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16)}, "v_cache"),
        "layout": ({"k_cache": torch.zeros(2, 2, 16, 4).transpose(2, 3)}, "contiguous"),
        "strides": ({"v_cache": torch.zeros(2, 4, 2, 16).transpose(1, 2)}, "must be alike"),
        "sinks": ({"sinks": torch.zeros(3)}, r"sinks must be contiguous float32 \[4\]"),
        "scale": ({"k_scale": torch.ones(2)}, "k_scale is given for a cache of torch.float32"),
        "no scale": (dict.fromkeys(("k_cache", "v_cache"), int8), "k_scale is missing"),
        "short scale": (
            {**dict.fromkeys(("k_cache", "v_cache"), int8), "k_scale": torch.ones(1)},
            r"k_scale must be contiguous float32 \[2\]",
        ),
        "mixed": ({"q": torch.zeros(1, 4, 16).half(), "out": torch.zeros(1, 4, 16).half()}, "the cache quantised"),
        "window": ({"window": 0}, "at least 1"),
        "soft_cap": ({"soft_cap": -1.0}, "must be positive"),
    }


@pytest.mark.parametrize("name", broken_calls())
def test_shapes_that_do_not_fit_are_refused(backend: AttentionBackend, name: str) -> None:
    changes, message = broken_calls()[name]
    arguments = {
        "q": torch.zeros(1, 4, 16),
        "k_cache": torch.zeros(2, 2, 4, 16),
        "v_cache": torch.zeros(2, 2, 4, 16),
        "metadata": AttentionMetadata.build([1], [3], [[1]], 4),
        "scale": 1.0,
        "out": torch.zeros(1, 4, 16),
    }
    with pytest.raises(ValueError, match=message):
        backend.paged_attention(**{**arguments, **changes})
