"""A simulated worker: the real batch state of `worker/` over a memory that notices wrong reads; no model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import pack, unpack
from protocol.messages import SchedulerOutput
from tests.sim.golden import extend, sample
from tests.sim.memory import KV, Memory
from tests.sim.scenario import Scenario
from worker.batch import InputBatch, StepInputs


class Misapplied(AssertionError):
    """A plan that was misapplied on purpose passed the digest."""


class SimulatedWorker:
    """One incarnation: its batch, its memory, its model. What it is told and says goes through `cluster`."""

    def __init__(self, scenario: Scenario, replica: int, number: int):
        self.scenario = scenario
        self.replica = replica
        self.worker_id = f"worker-{replica}"
        self.incarnation = f"{replica}-{number}"
        self.identity = f"{self.worker_id}-{number:016x}".encode()
        config = scenario.config
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, scenario.windows, config.block_size)
        self.memory = Memory(scenario.windows, scenario.num_blocks[replica], config.block_size)
        self.sequences: list[list[KV]] = [[] for _ in range(config.max_num_seqs)]
        """Per row: the KV that its tokens must have, as far as computed."""
        self.states = [0] * config.max_num_seqs
        """Per row: the hash of the tokens in `sequences`."""

    def run(self, plan: SchedulerOutput, misapplied: SchedulerOutput | None = None) -> NDArray[np.int32]:
        """Apply a plan and run it: the sampled tokens. With `misapplied` that is applied instead, and must not pass.

        Raises PlanError as the real batch does, WrongRead or WrongWrite when a row sees what it must not.
        """
        inputs = self.batch.apply(misapplied or plan)
        if misapplied is not None:
            raise Misapplied(f"plan {plan.step} was misapplied and its digest agreed")
        for request in plan.admit:
            self.sequences[request.row] = []
            self.states[request.row] = 0
        tables = [table.cpu[inputs.rows].tolist() for table in self.batch.tables]
        forward(self, inputs, tables)
        return self._sample(inputs)

    def write(self, inputs: StepInputs, place: int) -> None:
        """Write the KV of one row's tokens of this step, in every group."""
        start, end = int(inputs.query_start_loc[place]), int(inputs.query_start_loc[place + 1])
        row = int(inputs.rows[place])
        sequence = self.sequences[row]
        known = int(inputs.seq_lens[place])
        state = self.states[row]
        for position in range(len(sequence), known):
            token = int(self.batch.token_ids[row, position])
            sequence.append((token, position, state))
            state = extend(state, token)
        self.states[row] = state
        positions = inputs.positions[start:end].tolist()
        values = [sequence[position] for position in positions]
        for group, slots in enumerate(inputs.slot_mapping):
            self.memory.write(group, slots[start:end].tolist(), values)

    def attend(self, inputs: StepInputs, tables: list[list[list[int]]], place: int) -> None:
        """Read everything that one row's queries of this step see, in every group."""
        start, end = int(inputs.query_start_loc[place]), int(inputs.query_start_loc[place + 1])
        row, last = int(inputs.rows[place]), int(inputs.seq_lens[place])
        for group, rows in enumerate(tables):
            self.memory.read(group, rows[place], self.sequences[row], last - (end - start), last, row)

    def _sample(self, inputs: StepInputs) -> NDArray[np.int32]:
        batch, scenario = self.batch, self.scenario
        rows = inputs.rows[inputs.sampling]
        tokens = np.zeros(len(rows), dtype=np.int32)
        for place, row in enumerate(rows.tolist()):
            tokens[place] = sample(
                self.states[row],
                len(self.sequences[row]),
                float(batch.temperature[row]),
                int(batch.seed[row]),
                scenario.model.vocab_size,
                scenario.nan_per_1000,
            )
        batch.append_sampled(rows, tokens)
        return tokens


def forward(worker: SimulatedWorker, inputs: StepInputs, tables: list[list[list[int]]]) -> None:
    """All K/V of the step are written before any row attends."""
    places = range(len(inputs.rows))
    for place in places:
        worker.write(inputs, place)
    for place in places:
        worker.attend(inputs, tables, place)


def run_held_row(plan: SchedulerOutput) -> SchedulerOutput | None:
    """The plan as a worker takes it that overlooks one held row; None when none is held."""
    held = unpack(plan.hold_rows)
    return _replaced(plan, hold_rows=pack(held[1:])) if len(held) else None


def swap_grown_ids(plan: SchedulerOutput) -> SchedulerOutput | None:
    """The plan with the first and last new block of a group exchanged; None when it hands out fewer than two."""
    for group, data in enumerate(plan.grow_ids):
        ids = unpack(data).copy()
        if len(ids) > 1:
            ids[[0, -1]] = ids[[-1, 0]]
            swapped = (*plan.grow_ids[:group], pack(ids), *plan.grow_ids[group + 1 :])
            return _replaced(plan, grow_ids=swapped)
    return None


def _replaced(plan: SchedulerOutput, **changes: object) -> SchedulerOutput:
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return SchedulerOutput(**{**fields, **changes})
