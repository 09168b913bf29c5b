"""Decode steps prepared for graphs: padded to a fixed size they have the bits of the step as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import triton_here
from devices import device_of, metadata_to
from paged_world import bits, make_queries, make_world

from kernels.graphs import GraphBackend
from kernels.metadata import AttentionMetadata

triton_here()  # decides how the kernels are imported

from kernels.triton.backend import TritonBackend  # noqa: E402
from kernels.triton.decode_plan import MOST_SPLITS, DecodeWork  # noqa: E402

LENGTHS = [1, 64, 65, 140, 17]
SPLIT = 64


def padded(metadata: AttentionMetadata, size: int) -> AttentionMetadata:
    """The step with rows of padding behind it, as a recorded step of `size` sequences sees it."""
    more = size - metadata.num_seqs
    starts = torch.cat([metadata.query_start_loc, metadata.query_start_loc[-1:].expand(more)])
    return dataclasses.replace(
        metadata,
        query_start_loc=starts,
        seq_lens=torch.cat([metadata.seq_lens, torch.zeros(more, dtype=torch.int32)]),
        block_table=torch.cat([metadata.block_table, metadata.block_table[:1].expand(more, -1)]),
        slot_mapping=torch.cat([metadata.slot_mapping, torch.full((more,), -1)]),
        num_seqs=size,
        num_tokens=size,
        host_query_start_loc=None,
        host_seq_lens=None,
    )


@pytest.mark.parametrize(("size", "window"), [(5, None), (8, 70)])
def test_recorded_work_gives_the_bits_of_planned_work(size: int, window: int | None) -> None:
    backend = TritonBackend(SPLIT)
    assert isinstance(backend, GraphBackend)
    world = make_world(LENGTHS, heads=(6, 2), head_dim=64, block_size=16, dtype=torch.float32, window=window)
    plan = backend.plan_decode(
        max_seqs=size, max_seq_len=144, num_q_heads=6, num_kv_heads=2, head_dim=64, block_size=16, window=window,
        kv_bytes=4,
    )  # fmt: skip
    words = torch.full((plan.num_words,), 2**30, dtype=torch.int32, device=device_of(backend))
    step = world.metadata([1] * len(LENGTHS))
    fixed = metadata_to(padded(step, size), words.device)
    plan.bind(fixed, words)
    q = make_queries(world, size)
    for lengths in (LENGTHS, [1, 2, 3, 4, 5], LENGTHS):  # the words of one step leave nothing for the next
        step = world.metadata([1] * len(LENGTHS), lengths)
        fixed.seq_lens[: len(lengths)] = step.seq_lens
        fixed.block_table[: len(lengths)] = step.block_table
        packed = plan.pack(fixed.seq_lens.cpu().numpy())
        assert packed is not None
        words.copy_(torch.from_numpy(packed))
        expected = world.attend(backend, q[: len(lengths)], step)
        out = world.attend(backend, q, fixed)
        assert torch.equal(bits(out[: len(lengths)]), bits(expected))
        assert out[len(lengths) :].isnan().all(), "padding rows are nobody's"


def test_every_length_within_the_bounds_fits() -> None:
    for window in (None, 1, 16, 63, 64, 65, 100):
        work = DecodeWork(max_seqs=1, max_seq_len=300, tile=16, split_size=64, window=window, block_q=4)
        packed = [work.pack(np.array([n], dtype=np.int32)) for n in range(301)]
        assert [words is not None and len(words) for words in packed] == [work.num_words] * 301, window
        assert work.num_words % 4 == 0


def test_more_work_than_there_is_room_for_is_refused() -> None:
    work = DecodeWork(max_seqs=64, max_seq_len=64 * 1000, tile=64, split_size=64, window=None, block_q=4)
    assert work.max_items == 64 + MOST_SPLITS
    assert work.pack(np.full(64, 64 * 17, dtype=np.int32)) is not None
    assert work.pack(np.full(64, 64 * 17 + 1, dtype=np.int32)) is None


def test_memory_of_another_size_is_not_bound() -> None:
    backend = TritonBackend()
    plan = backend.plan_decode(
        max_seqs=2, max_seq_len=64, num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=16, window=None
    )
    metadata = AttentionMetadata.build([1], [1], [[1]], 16)
    with pytest.raises(ValueError, match="must be contiguous int32"):
        plan.bind(metadata, torch.zeros(plan.num_words + 1, dtype=torch.int32))


def test_a_recording_never_plans_on_the_host() -> None:
    """Attention of a shape for which no plan was bound would wait for the device in the middle of a recording."""
    backend = TritonBackend()
    world = make_world([5], heads=(2, 1), head_dim=16, block_size=16, dtype=torch.float32)
    plan = backend.plan_decode(
        max_seqs=1, max_seq_len=64, num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=16, window=None, kv_bytes=2
    )
    metadata = world.metadata([1])
    plan.bind(metadata, torch.zeros(plan.num_words, dtype=torch.int32))
    with pytest.raises(ValueError, match="kv_bytes=4"):
        world.attend(backend, make_queries(world, 1), metadata)
