"""Tile shapes that compile without spills, by head size, page and kind of work. Data, not search: nothing is tuned in
serving. `compile_check` proves the claims for every row."""

from __future__ import annotations

from dataclasses import dataclass

SPLIT_SIZE = 2048
"""Keys of a split: fixed, so that where a sequence is cut depends on nothing but itself."""


@dataclass(frozen=True)
class Tiles:
    """block_m: rows (query tokens times heads of a group); tile: keys; contiguous: a tile lies within one block."""

    block_m: int
    tile: int
    contiguous: bool
    num_warps: int
    num_stages: int


def pick_tiles(*, group_size: int, head_dim: int, page: int, prefill: bool) -> Tiles:
    """Rows for at least one token of all heads of a group; 16 rows for decode, 64 for prefill (wgmma needs 64)."""
    rows = 16
    while rows < group_size:
        rows *= 2
    if prefill:
        rows = max(rows, 64)
    wide = head_dim > 128
    tile = 32 if wide else 64
    contiguous = page % tile == 0
    if not contiguous and page >= 16 and page & (page - 1) == 0 and page < tile and not prefill:
        tile, contiguous = page, True  # one page a tile: half the instructions of the gather
    warps = 8 if wide and prefill else 4
    stages = 2 if wide or not contiguous else 3
    return Tiles(rows, tile, contiguous, warps, stages)
