"""The Triton backend with tiles of one's own choosing, to time them against those of its table. Serves nobody."""

from __future__ import annotations

from bench.kernels.cases import TileChoice
from kernels.triton.backend import StepShape, TritonBackend
from kernels.triton.tiles import SPLIT_SIZE, Kind, Tiles


class ChosenTiles(TritonBackend):
    """`choice` in place of the table's tiles for decode or for all prefill, whichever it is for."""

    def __init__(self, choice: TileChoice, split_size: int = SPLIT_SIZE) -> None:
        super().__init__(split_size)
        self.choice = choice

    def _tiles(self, shape: StepShape, kind: Kind) -> Tiles:
        choice = self.choice
        if (kind is Kind.DECODE) != choice.for_decode:
            return super()._tiles(shape, kind)
        return Tiles(choice.block_m, choice.tile, shape.page % choice.tile == 0, choice.num_warps, choice.num_stages)
