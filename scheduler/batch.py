"""The rows of one replica: every running request's progress in numpy arrays, so a step costs what changes in it.

Row r is one slot on both sides of the wire. Pure data with bind/unbind; who gets a row and what runs is `planner`'s.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from scheduler.request import Request

I64 = NDArray[np.int64]
NO_LIMIT = np.iinfo(np.int64).max
"""`limit` of a row that is not in use."""


class RowBatch:
    """Arrays of length num_rows; a row that is not `active` holds zeros, and no limit: what looks for rows that are due
    compares whole arrays and asks nobody which rows are in use.

    Twins told apart: `committed` tokens are known here; `known` tokens are known to the worker once it has run all
    issued plans (committed plus sampled in flight); `planned` of them have their KV computed by then
    (num_computed_tokens after the last issued plan). A row in steady decode has known - planned == 1.
    """

    def __init__(self, num_rows: int, max_model_len: int, num_groups: int, block_size: int):
        self.num_rows = num_rows
        self.block_size = block_size
        self.active: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.committed: I64 = np.zeros(num_rows, dtype=np.int64)
        self.known: I64 = np.zeros(num_rows, dtype=np.int64)
        self.planned: I64 = np.zeros(num_rows, dtype=np.int64)
        self.published: I64 = np.zeros(num_rows, dtype=np.int64)
        """Leading tokens whose blocks were offered to the prefix map; whole blocks."""
        self.slots: I64 = np.zeros(num_rows, dtype=np.int64)
        """Tokens that the block tables have room for: their length times the block size."""
        self.front: I64 = np.zeros((num_groups, num_rows), dtype=np.int64)
        """Per group: leading null entries of a window's table."""
        self.limit: I64 = np.full(num_rows, NO_LIMIT, dtype=np.int64)
        self.prompt_len: I64 = np.zeros(num_rows, dtype=np.int64)
        self.min_len: I64 = np.zeros(num_rows, dtype=np.int64)
        """Shortest total length at which a stop token counts."""
        self.stop_ids: NDArray[np.int32] = np.full((0, num_rows), -1, dtype=np.int32)
        """[as many as any row had, num_rows]; -1: none. So a comparison runs along the rows."""
        blocks = -(-max_model_len // block_size) | 1  # odd, or one place of all rows would share few sets of a cache
        self.token_blocks: NDArray[np.int32] = np.zeros((num_rows, blocks, block_size), dtype=np.int32)
        """The memory of `token_ids`, by block."""
        self.token_ids: NDArray[np.int32] = self.token_blocks.reshape(num_rows, -1)[:, :max_model_len]
        """The first `committed` of a row are valid."""
        self.connection: I64 = np.zeros(num_rows, dtype=np.int64)
        self.handle: I64 = np.zeros(num_rows, dtype=np.int64)
        self.binding: I64 = np.zeros(num_rows, dtype=np.int64)
        self.last_token_at: NDArray[np.float64] = np.full(num_rows, np.nan)
        """When the latest token was committed, seconds; NaN: none yet."""
        self.requests: list[Request | None] = [None] * num_rows
        self.reporting: dict[int, Request] = {}
        """By row: requests that entered it with log-probabilities of their prompt due."""
        self.long_prompts: set[int] = set()
        """Rows that had much to compute when they were bound, and are not through with it."""
        self._free = list(range(num_rows))
        self.to_finish: list[int] = []
        """Rows the worker still holds for a request that left; the next plan says so."""

    @property
    def num_active(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    def bind(self, request: Request, num_computed: int, num_hit_blocks: int, binding: int) -> int:
        """Give `request` the lowest free row. `num_computed`: tokens whose KV its blocks hold."""
        row = heapq.heappop(self._free)
        n = len(request.tokens)
        self.active[row] = True
        self.committed[row] = self.known[row] = n
        self.planned[row] = num_computed
        self.published[row] = self.slots[row] = num_hit_blocks * self.block_size
        self.limit[row] = request.limit
        self.prompt_len[row] = request.prompt_len
        self.min_len[row] = request.prompt_len + request.sampling.min_tokens
        self._set_stop_ids(row, request.stop_ids)
        self.token_ids[row, :n] = request.tokens
        self.connection[row] = request.connection
        self.handle[row] = request.handle
        self.binding[row] = request.binding = binding
        self.last_token_at[row] = request.last_token_at
        self.requests[row] = request
        if request.prompt_logprobs_due:
            self.reporting[row] = request
        request.row = row
        request.in_flight = 0
        return row

    def unbind(self, row: int) -> Request:
        """Take the request out of its row: its committed tokens and its debt of tokens in flight go back to it."""
        request = self.requests[row]
        assert request is not None and self.active[row], f"row {row} is not in use"
        request.tokens = self.token_ids[row, : self.committed[row]].copy()
        request.in_flight = int(self.known[row] - self.committed[row])
        request.last_token_at = float(self.last_token_at[row])
        request.row = None
        self.requests[row] = None
        self.reporting.pop(row, None)
        self.long_prompts.discard(row)
        self.active[row] = False
        self.committed[row] = self.known[row] = self.planned[row] = 0
        self.published[row] = self.slots[row] = 0
        self.limit[row] = NO_LIMIT
        self.front[:, row] = 0
        self.binding[row] = 0
        heapq.heappush(self._free, row)
        return request

    def running(self) -> list[Request]:
        """The requests that hold rows, rows ascending."""
        return [request for request in self.requests if request is not None]

    def requests_of(self, rows: I64) -> list[Request]:
        """The requests in these rows, all of which must be in use."""
        found = [request for row in rows.tolist() if (request := self.requests[row]) is not None]
        assert len(found) == len(rows), "a row is not in use"
        return found

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        width = len(self.stop_ids)
        if len(stop_ids) > width:
            wider = np.full((len(stop_ids), self.num_rows), -1, dtype=np.int32)
            wider[:width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[:, row] = -1
        self.stop_ids[: len(stop_ids), row] = stop_ids

    def check(self) -> None:
        """Raise AssertionError if the arrays disagree with each other or with the requests they stand for."""
        used = [row for row in range(self.num_rows) if self.requests[row] is not None]
        assert used == np.nonzero(self.active)[0].tolist()
        assert sorted(used + self._free) == list(range(self.num_rows)), "a row is lost or held twice"
        for row in used:
            request = self.requests[row]
            assert request is not None and request.row == row and request.binding == self.binding[row]
            assert self.planned[row] <= self.known[row] and self.committed[row] <= self.known[row]
            assert self.known[row] <= self.limit[row], f"row {row} was planned past its limit"
            assert self.slots[row] == len(request.blocks[0]) * self.block_size, f"row {row}"
            assert self.published[row] % self.block_size == 0 and self.published[row] <= self.slots[row]
        idle = ~self.active
        for values in (self.committed, self.known, self.planned, self.published, self.slots, self.binding):
            assert not values[idle].any()
        assert (self.limit[idle] == NO_LIMIT).all()
