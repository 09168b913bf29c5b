"""Tile shapes that compile without spills, by head size, page and kind of work. Data, not search: nothing is tuned in
serving. `compile_check` proves the claims for every row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

SPLIT_SIZE = 2048
"""Keys of a split: fixed, so that where a sequence is cut depends on nothing but itself."""

LONG_ROWS = 512
"""Rows (query tokens times heads of a group) from which on a sequence's prefill is a long one."""
WRITE_TILE = 4096
"""Elements of K that one program of write_kv takes at most."""


class Kind(IntEnum):
    """What a sequence does in a step; its own query length decides, so its neighbours don't."""

    DECODE = 0  # one query token
    PREFILL = 1
    LONG_PREFILL = 2  # LONG_ROWS rows or more


@dataclass(frozen=True)
class Tiles:
    """block_m: rows (query tokens times heads of a group); tile: keys; contiguous: a tile lies within one block."""

    block_m: int
    tile: int
    contiguous: bool
    num_warps: int
    num_stages: int


def pick_tiles(
    *, group_size: int, head_dim: int, page: int, kind: Kind, kv_bytes: int = 2, hopper: bool = True
) -> Tiles:
    """Rows for at least one token of all heads of a group; 16 rows for decode, 64 or 128 for prefill (wgmma needs 64).

    A long prefill reads K and V once per block of rows: twice the rows, half the traffic from the L2 cache.
    kv_bytes: of an element of the cache. hopper: compute capability 9 or more. Before it the products live in
    registers, and tiles of 64 keys spill.
    """
    rows = 16
    while rows < group_size:
        rows *= 2
    if kv_bytes == 4:  # no tensor cores: products are multiplied and added one by one, out of registers
        tile, warps = (32, 8) if head_dim <= 64 else (16, 4)
        return Tiles(rows, tile, page % tile == 0, warps, num_stages=3)
    prefill = kind is not Kind.DECODE
    if prefill:
        rows = max(rows, 64)
    wide = head_dim > 128
    tile = 64 if hopper and not wide else 32
    contiguous = page % tile == 0
    if not contiguous and not prefill and page in (16, 32):
        tile, contiguous = page, True  # one page a tile: half the instructions of the gather
    elif not contiguous and not prefill:
        tile, contiguous = 32, page % 32 == 0  # addresses of 64 gathered keys do not fit into the registers
    warps = 8 if prefill and (wide or (contiguous and not hopper)) else 4
    stages = 3 if not prefill or not hopper or kv_bytes == 1 or (contiguous and not wide) else 2
    if kind is Kind.LONG_PREFILL and hopper and not wide and rows == 64:
        rows, warps = 128, 8
    return Tiles(rows, tile, contiguous, warps, stages)


def merge_warps(block_m: int, d_pad: int) -> int:
    """Warps of the merge of split ranges: it holds a tile of sums and one of values, at most 64 elements a thread."""
    return max(4, block_m * d_pad // 2048)
