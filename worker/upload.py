"""What a step sends to the device: its inputs, the changes of its block tables, which rows sample; all in one copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.batch import StepInputs
from worker.device import Device, Mark
from worker.device_table import DeviceTable
from worker.layout import Layout
from worker.staging import Staged, StagingRing

Arrays = dict[str, NDArray[Any]]


class Upload(NamedTuple):
    """What was sent, on the device."""

    buffer: Tensor
    """uint8: all of it; the inputs of the model stand first, by the layout of `input_arrays`."""
    views: dict[str, Tensor]
    staged: Staged

    def free_after(self, mark: Mark) -> None:
        """All work that reads this is enqueued, and done at `mark`."""
        self.staged.free_after = mark


def input_arrays(step: StepInputs) -> Arrays:
    """What the model is told: names and order are those of a recorded step, too. A step without slots has no positions
    either: the device makes both (`worker.places`)."""
    arrays: Arrays = {
        "input_ids": step.input_ids,
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "rows": step.rows,
    }
    if step.slot_mapping:
        arrays["positions"] = step.positions
        arrays.update({f"slots.{group}": slots for group, slots in enumerate(step.slot_mapping)})
    return arrays


class StepUploader:
    """Sends steps through a ring of buffers, and brings the device's block tables up to date with them."""

    def __init__(self, device: Device, tables: list[DeviceTable]) -> None:
        self._device = device
        self._tables = tables
        self.ring = StagingRing(device)

    def send(self, step: StepInputs, inputs: Arrays) -> Upload:
        """inputs: as of `input_arrays`, or what a recorded step packed.

        Further views of the upload, int64: "last" [R], the place of the last token of each row that samples;
        "sampling_rows" [R], the row; "copy_src" and "copy_dst".
        """
        arrays: Arrays = {
            **inputs,
            "last": step.query_start_loc[step.sampling + 1].astype(np.int64) - 1,
            "sampling_rows": step.rows[step.sampling],
            "copy_src": step.copy_src.astype(np.int64),
            "copy_dst": step.copy_dst.astype(np.int64),
        }
        for group, table in enumerate(self._tables):
            arrays[f"changed_at.{group}"], arrays[f"changed_to.{group}"] = table.take_changes()
        layout = Layout(arrays)
        staged = self.ring.acquire(layout.end)
        layout.write(arrays, staged.host)
        self._device.upload(staged.host[: layout.end], staged.device[: layout.end])
        views = layout.views(staged.device)
        for group, table in enumerate(self._tables):
            if len(arrays[f"changed_at.{group}"]):
                table.scatter(views[f"changed_at.{group}"], views[f"changed_to.{group}"])
        return Upload(staged.device, views, staged)
