"""Tiles other than the table's compute the same: what is timed with them may be put into the table."""

from __future__ import annotations

import pytest
import torch
from conftest import triton_here
from paged_world import assert_close, make_queries, make_world

from bench.kernels.cases import TileChoice

triton_here()  # decides how the kernels are imported

from bench.kernels.tiles import ChosenTiles  # noqa: E402

CHOICES = [TileChoice(16, 16, 4, 4), TileChoice(32, 128, 8, 2), TileChoice(128, 32, 8, 3)]
LENGTHS = [(1, 1), (1, 65), (1, 200), (3, 130), (70, 150)]
"""(query tokens, tokens visible): decode, chunks."""


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_chosen_tiles_compute_the_same(choice: TileChoice, block_size: int) -> None:
    world = make_world([n for _, n in LENGTHS], heads=(6, 2), head_dim=64, block_size=block_size, dtype=torch.float32)
    metadata = world.metadata([q for q, _ in LENGTHS])
    q = make_queries(world, metadata.num_tokens)
    backend = ChosenTiles(choice, split_size=128)
    assert_close(world.attend(backend, q, metadata), world.expected(q, metadata), backend)
