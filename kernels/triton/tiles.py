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


def pick_tiles(*, group_size: int, head_dim: int, page: int, prefill: bool, hopper: bool = True) -> Tiles:
    """Rows for at least one token of all heads of a group; 16 rows for decode, 64 for prefill (wgmma needs 64).

    hopper: compute capability 9 or more. Before it the products live in registers, and tiles of 64 keys spill.
    """
    rows = 16
    while rows < group_size:
        rows *= 2
    if prefill:
        rows = max(rows, 64)
    wide = head_dim > 128
    tile = 64 if hopper and not wide else 32
    contiguous = page % tile == 0
    if not contiguous and not prefill and page in (16, 32):
        tile, contiguous = page, True  # one page a tile: half the instructions of the gather
    warps = 8 if prefill and (wide or (contiguous and not hopper)) else 4
    stages = 3 if not hopper or (contiguous and not (wide and prefill)) else 2
    return Tiles(rows, tile, contiguous, warps, stages)
