"""The worker's batch: plans in, arrays out. Pure numpy: no device, no model, no sockets.

Holds what every running row knows (tokens, position, sampling parameters, block tables) and applies each plan's changes
to it, in the plan's order. A row in steady decode advances by one token every step with nothing said about it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import unpack
from protocol.digest import TableDigest
from protocol.messages import NewRequestData, SchedulerOutput
from protocol.windows import first_live_block
from worker.block_table import BlockTable

I64 = NDArray[np.int64]


class PlanError(RuntimeError):
    """The plan cannot be run; the planes disagree. Nothing was computed."""


class DigestMismatch(PlanError):
    """Block tables or positions differ from the scheduler's."""

    def __init__(self, expected: int, actual: int):
        super().__init__("digest")
        self.expected = expected
        self.actual = actual


class StepInputs(NamedTuple):
    """One step, packed: S rows that run, T tokens."""

    rows: I64
    """int64 [S], ascending."""
    query_start_loc: NDArray[np.int32]
    """int32 [S + 1]: row i's tokens are [query_start_loc[i], query_start_loc[i + 1])."""
    seq_lens: NDArray[np.int32]
    """int32 [S]: tokens visible to a row's last query, this step's included."""
    input_ids: NDArray[np.int32]
    """int32 [T]; -1 - r for the token that row r sampled last, if only the device knows it (`expect_sampled`)."""
    positions: I64
    """int64 [T]."""
    slot_mapping: tuple[I64, ...]
    """Per cache group: int64 [T]. Empty if the batch does not map slots."""
    sampling: I64
    """int64 [R]: places within `rows` of those that sample, ascending."""
    copy_src: NDArray[np.int32]
    copy_dst: NDArray[np.int32]


class PromptPart(NamedTuple):
    """`num_tokens` tokens of a row's prompt, from position `start`; the step's token `first` is the one at `start`."""

    row: int
    first: int
    start: int
    num_tokens: int


class InputBatch:
    """State of all rows. `windows`: per cache group its sliding window (0: full attention)."""

    def __init__(
        self, num_rows: int, max_model_len: int, windows: tuple[int, ...], block_size: int, *, blocks_per_id: int = 1
    ):
        self.windows = windows
        self.id_size = block_size
        """Tokens of a scheduler's block."""
        max_blocks = -(-max_model_len // block_size)
        self.tables = [BlockTable(num_rows, max_blocks, block_size // blocks_per_id, blocks_per_id) for _ in windows]
        self.active: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.num_tokens: I64 = np.zeros(num_rows, dtype=np.int64)
        """Tokens the row knows: prompt and sampled."""
        self.num_computed: I64 = np.zeros(num_rows, dtype=np.int64)
        """Tokens whose KV is computed once this plan has run."""
        self.prompt_len: I64 = np.zeros(num_rows, dtype=np.int64)
        self.front: I64 = np.zeros((len(windows), num_rows), dtype=np.int64)
        self.token_ids: NDArray[np.int32] = np.zeros((num_rows, max_model_len), dtype=np.int32)
        """-1 - r where it is what row r has sampled and only the device knows."""
        self.temperature: NDArray[np.float32] = np.zeros(num_rows, dtype=np.float32)
        self.top_k: I64 = np.zeros(num_rows, dtype=np.int64)
        self.top_p: NDArray[np.float32] = np.ones(num_rows, dtype=np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(num_rows, dtype=np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        self.num_logprobs: I64 = np.zeros(num_rows, dtype=np.int64)
        """Candidates to report with each token drawn: 1 + k, or 0 if nobody asked."""
        self.num_prompt_logprobs: I64 = np.zeros(num_rows, dtype=np.int64)
        """The same with each prompt token but the first."""
        self.maps_slots = True
        """Whether steps say where the K and V of their tokens go; else somebody finds that in the tables."""
        self.digest = TableDigest(num_rows)
        self._in_use: I64 | None = None
        """The active rows, ascending; None: to be looked for. Never changed in place: steps hold it."""
        self._one_each: NDArray[np.int32] = np.arange(num_rows + 1, dtype=np.int32)
        """query_start_loc of the step in which every row runs one token."""
        self.epoch = 0
        self.next_step = 0

    def start_epoch(self, epoch: int) -> None:
        """Forget everything; the scheduler counts from 0 again."""
        for row in np.nonzero(self.active)[0].tolist():
            self._finish(row)
        self.epoch, self.next_step = epoch, 0

    def apply(self, plan: SchedulerOutput) -> StepInputs:
        """Apply a plan and pack what it runs.

        Raises DigestMismatch, or PlanError naming what else is wrong; then nothing may run until the next epoch.
        """
        if (plan.epoch, plan.step) != (self.epoch, self.next_step):
            raise PlanError(f"plan is epoch {plan.epoch} step {plan.step}, expected {self.epoch} step {self.next_step}")
        self.next_step += 1
        try:
            self._apply_changes(plan)
            rows, lengths = self._runs(plan)
        except (IndexError, ValueError, OverflowError) as error:
            raise PlanError(f"malformed plan: {error}") from error
        self.num_computed[rows] += 1 if lengths is None else lengths
        actual = self.digest.value(self.num_computed)
        if actual != plan.digest:
            raise DigestMismatch(plan.digest, actual)
        return self._pack(plan, rows, lengths)

    def append_sampled(self, rows: I64, tokens: NDArray[np.int32]) -> None:
        """Rows have sampled: they know one token more. tokens int32 [R]; -1 (failed) is kept as 0, the row will end."""
        self.token_ids[rows, np.minimum(self.num_tokens[rows], self.token_ids.shape[1] - 1)] = np.maximum(tokens, 0)
        self.num_tokens[rows] += 1

    def reported_prompts(self, step: StepInputs) -> list[PromptPart]:
        """What of the prompts runs in this step and is followed by a prompt token of which somebody wants to know."""
        if not self.num_prompt_logprobs.any():
            return []
        found = []
        for place in np.nonzero(self.num_prompt_logprobs[step.rows])[0].tolist():
            row, first = int(step.rows[place]), int(step.query_start_loc[place])
            start = int(step.seq_lens[place]) - (int(step.query_start_loc[place + 1]) - first)
            count = min(int(step.seq_lens[place]), int(self.prompt_len[row]) - 1) - start
            if count > 0:
                found.append(PromptPart(row, first, start, count))
        return found

    def expect_sampled(self, rows: I64) -> None:
        """Rows sample in a step whose result is not in yet: they know one token more, written down as -1 - row."""
        self.token_ids[rows, np.minimum(self.num_tokens[rows], self.token_ids.shape[1] - 1)] = -1 - rows
        self.num_tokens[rows] += 1

    # ------------------------------------------------------------------------------------------- the plan's changes

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        """finish, admit, window fronts, grow: in this order, since a row may be given away in the plan that ends it."""
        if plan.finish_rows:
            for row in unpack(plan.finish_rows, "finish_rows").tolist():
                self._finish(row)
        for request in plan.admit:
            self._admit(request)
        self._drop_fronts()
        self._grow(plan)

    def _finish(self, row: int) -> None:
        if not self.active[row]:
            raise ValueError(f"row {row} is not in use")
        self.active[row] = False
        self._in_use = None
        self.num_tokens[row] = self.num_computed[row] = self.prompt_len[row] = 0
        self.num_logprobs[row] = self.num_prompt_logprobs[row] = 0
        self.front[:, row] = 0
        for table in self.tables:
            table.clear_row(row)
        self.digest.clear_row(row)

    def _admit(self, request: NewRequestData) -> None:
        row, tokens = request.row, unpack(request.token_ids, "token_ids")
        if not 0 <= row < len(self.active) or self.active[row]:
            raise ValueError(f"row {row} is in use or does not exist")
        if len(request.block_ids) != len(self.tables):
            raise ValueError(f"{len(request.block_ids)} block tables for {len(self.tables)} cache groups")
        if not len(tokens) or not 0 <= request.num_computed_tokens < len(tokens):
            raise ValueError(f"row {row}: {request.num_computed_tokens} of {len(tokens)} tokens computed")
        self.active[row] = True
        self._in_use = None
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_computed[row] = request.num_computed_tokens
        self.prompt_len[row] = request.prompt_len
        sampling = request.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed or 0
        self.num_logprobs[row] = 0 if sampling.logprobs is None else 1 + sampling.logprobs
        self.num_prompt_logprobs[row] = 0 if sampling.prompt_logprobs is None else 1 + sampling.prompt_logprobs
        for group, (table, data) in enumerate(zip(self.tables, request.block_ids, strict=True)):
            ids = unpack(data, "block_ids")
            table.add_row(row, ids)
            self.digest.add(np.full(len(ids), row), group, np.arange(len(ids)), ids)
            if self.windows[group]:
                self.front[group, row] = first_live_block(
                    request.num_computed_tokens, self.windows[group], self.id_size
                )

    def _drop_fronts(self) -> None:
        """Null what no later query of a window group sees, from the first position each active row computes next."""
        for group, window in enumerate(self.windows):
            if not window:
                continue
            fronts = first_live_block(self.num_computed, window, self.id_size)
            for row in np.nonzero(self.active & (fronts > self.front[group]))[0].tolist():
                start, end = int(self.front[group, row]), int(fronts[row])
                ids = self.tables[group].null_front(row, start, end)
                self.digest.remove(np.full(end - start, row), group, np.arange(start, end), ids)
                self.front[group, row] = end

    def _grow(self, plan: SchedulerOutput) -> None:
        if not plan.grow_rows:
            return
        rows = unpack(plan.grow_rows, "grow_rows").astype(np.int64)
        if not self.active[rows].all():
            raise ValueError("a row that is not in use grows")
        owners, within = rows, np.zeros(1, dtype=np.int64)
        if plan.grow_counts:
            counts = unpack(plan.grow_counts, "grow_counts").astype(np.int64)
            if len(counts) != len(rows):
                raise ValueError(f"growth of {len(rows)} rows has {len(counts)} counts")
            owners = np.repeat(rows, counts)
            ends = np.cumsum(counts)
            within = np.arange(len(owners)) - np.repeat(ends - counts, counts)
        if len(plan.grow_ids) != len(self.tables):
            raise ValueError(f"growth of {len(plan.grow_ids)} groups, there are {len(self.tables)}")
        for group, (table, data) in enumerate(zip(self.tables, plan.grow_ids, strict=True)):
            ids = unpack(data, "grow_ids")
            if len(ids) != len(owners):
                raise ValueError(f"group {group}: {len(ids)} block ids for {len(owners)} blocks")
            self.digest.add(owners, group, table.num_ids[owners] + within, ids)
            if plan.grow_counts:
                for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
                    table.append_row(row, ids[start:end])
            else:
                table.append_one_each(rows, ids)

    def _runs(self, plan: SchedulerOutput) -> tuple[I64, I64 | None]:
        """int64 [S]: the rows that run, ascending; int64 [S]: their tokens in this step, or None: one each."""
        if not (plan.prefill_rows or plan.prefill_num_tokens or plan.hold_rows):
            if self._in_use is None:
                self._in_use = np.nonzero(self.active)[0]
            rows, lengths = self._in_use, None
        else:
            counts = self.active.astype(np.int64)
            prefill = unpack(plan.prefill_rows, "prefill_rows")
            counts[prefill] = unpack(plan.prefill_num_tokens, "prefill_num_tokens")
            counts[unpack(plan.hold_rows, "hold_rows")] = 0
            if (counts < 0).any() or (counts[~self.active] != 0).any():
                raise ValueError("a row that is not in use runs, or a count is negative")
            rows = np.nonzero(counts)[0]
            lengths = counts[rows]
        if (self.num_computed[rows] + (1 if lengths is None else lengths) > self.num_tokens[rows]).any():
            raise ValueError("a row runs more tokens than it knows")
        return rows, lengths

    def _pack(self, plan: SchedulerOutput, rows: I64, lengths: I64 | None) -> StepInputs:
        ends = self.num_computed[rows]
        if lengths is None:
            query_start_loc, owners, positions = self._one_each[: len(rows) + 1], rows, ends - 1
        else:
            query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(lengths, out=query_start_loc[1:])
            owners = np.repeat(rows, lengths)
            positions = np.repeat(ends - lengths - query_start_loc[:-1], lengths) + np.arange(len(owners))
        return StepInputs(
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            input_ids=self.token_ids[owners, positions],
            positions=positions,
            slot_mapping=tuple(table.slots(owners, positions) for table in self.tables) if self.maps_slots else (),
            sampling=np.nonzero(ends == self.num_tokens[rows])[0],
            copy_src=unpack(plan.copy_src, "copy_src"),
            copy_dst=unpack(plan.copy_dst, "copy_dst"),
        )
