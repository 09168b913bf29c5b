"""Decode steps recorded once at a few padded sizes and replayed: one launch for the hundreds of a step.

Knows sizes, inputs at fixed addresses, and what attention plans beforehand. What is recorded is given from outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backend import AttentionBackend
from kernels.graphs import DecodePlan
from kernels.metadata import AttentionMetadata
from worker.batch import StepInputs
from worker.device import Device
from worker.device_table import DeviceTable
from worker.layout import Layout
from worker.metadata import metadata_of
from worker.padding import no_rows, pad_decode
from worker.places import PlaceFinder
from worker.upload import Arrays, input_arrays

Forward = Callable[[Tensor, Tensor, list[AttentionMetadata]], Tensor]
"""input_ids int32 [T], positions int64 [T], metadata per cache group → logits float32 [T, V]."""


class RecordedStep:
    """Decode of up to `size` rows. plans: per cache group what its attention does, in words that lie in the inputs."""

    def __init__(
        self,
        size: int,
        plans: list[DecodePlan],
        tables: list[DeviceTable],
        places: PlaceFinder,
        max_seq_len: int,
        backend: AttentionBackend,
        forward: Forward,
        device: Device,
    ) -> None:
        self.size = size
        self._plans = plans
        self._tables = tables
        self._places = places
        self._max_seq_len = max_seq_len
        self._backend = backend
        self._forward = forward
        self._launches: dict[str, int] = {}
        """By counter of the backend: what one run adds to it. A replay calls no Python that could count."""
        empty = self.pack(no_rows(0 if places.on_device else len(plans)))
        assert empty is not None, "no work always fits"
        layout = Layout(empty)
        host = torch.zeros(layout.end, dtype=torch.uint8)
        layout.write(empty, host)
        self._inputs = host.to(tables[0].tensor.device)
        self._views = layout.views(self._inputs)
        self._replay = device.record(self._body)

    def pack(self, step: StepInputs) -> Arrays | None:
        """The inputs of a decode step. None if its attention is more work than was recorded: run it otherwise."""
        padded = pad_decode(step, self.size)
        arrays = input_arrays(padded)
        for group, plan in enumerate(self._plans):
            words = plan.pack(padded.seq_lens)
            if words is None:
                return None
            arrays[f"work.{group}"] = words
        return arrays

    def run(self, inputs: Tensor) -> Tensor:
        """inputs: uint8 on the device that begins as packed → logits float32 [size, V], good until the next run."""
        counted = dict(self._backend.counters)
        self._inputs.copy_(inputs[: len(self._inputs)])
        logits = self._replay()
        self._backend.counters.update({name: counted[name] + count for name, count in self._launches.items()})
        return logits

    def _body(self) -> Tensor:
        before = dict(self._backend.counters)
        views = self._views
        places = self._places.find(views)  # recorded with the rest: a replay makes them anew
        metadata = metadata_of(
            self._tables,
            rows=views["rows"],
            query_start_loc=views["query_start_loc"],
            seq_lens=views["seq_lens"],
            slot_mapping=places.slot_mapping,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        for group, plan in enumerate(self._plans):
            plan.bind(metadata[group], views[f"work.{group}"])
        logits = self._forward(views["input_ids"], places.positions, metadata)
        self._launches = {name: count - before[name] for name, count in self._backend.counters.items()}
        return logits


class DecodeGraphs:
    """One RecordedStep for each of `sizes` (ascending). make(size) records one; the largest is recorded first, so that
    the others find the memory it took."""

    def __init__(self, sizes: list[int], make: Callable[[int], RecordedStep]) -> None:
        self.sizes = sizes
        self._steps = {size: make(size) for size in reversed(sizes)}

    def for_step(self, step: StepInputs) -> RecordedStep | None:
        """The smallest that has room, if every row of the step computes one token; there must not be more rows than the
        largest has room for."""
        if not 0 < len(step.rows) == len(step.input_ids):
            return None
        return self._steps[self.sizes[bisect_left(self.sizes, len(step.rows))]]
