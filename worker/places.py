"""Where the tokens of a step stand and where their K and V go, on the device: uploaded by the host, or made there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import AttentionBackend
from kernels.slots import MapSlots, SlotBackend
from worker.device_table import DeviceTable


class Places(NamedTuple):
    """Of T tokens, or of the T that a recorded step has room for."""

    positions: Tensor
    """int64 [T]."""
    slot_mapping: list[Tensor]
    """Per cache group: int64 [T]; -1: write nothing."""


class PlaceFinder:
    """For the cache groups of one worker. It must be told of a step once its table changes are enqueued."""

    def __init__(self, backend: AttentionBackend, tables: list[DeviceTable]) -> None:
        self._num_groups = len(tables)
        self._device = tables[0].tensor.device
        self._map_slots: MapSlots | None = None
        if isinstance(backend, SlotBackend):
            self._map_slots = backend.slot_mapper(
                [table.tensor for table in tables], [table.table.block_size for table in tables]
            )

    @property
    def on_device(self) -> bool:
        """Whether they are made there; then the host neither computes nor uploads them."""
        return self._map_slots is not None

    def find(self, views: Mapping[str, Tensor]) -> Places:
        """views: the inputs of a step by name, on the device, as of `upload.input_arrays`."""
        if self._map_slots is None:
            return Places(views["positions"], [views[f"slots.{group}"] for group in range(self._num_groups)])
        num_tokens = views["input_ids"].shape[0]
        positions = torch.empty(num_tokens, dtype=torch.int64, device=self._device)
        slots = torch.empty((self._num_groups, num_tokens), dtype=torch.int64, device=self._device)
        self._map_slots(views["rows"], views["query_start_loc"], views["seq_lens"], slots, positions)
        return Places(positions, list(slots))

    def warm_up(self) -> None:
        """Compile what `find` launches, for one row that has no token."""
        none = torch.zeros(2, dtype=torch.int32, device=self._device)
        self.find({"input_ids": none[:1], "rows": none[:1].long(), "query_start_loc": none, "seq_lens": none[:1]})
