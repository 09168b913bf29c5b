"""Where a backend of these tests computes, and how tensors come there: with their strides, which are part of a test.

Without a GPU that is the CPU for all of them. With one, the Triton backend's kernels are compiled and run on it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata


def device_of(backend: AttentionBackend) -> torch.device:
    return torch.device("cuda" if backend.name == "triton" and torch.cuda.is_available() else "cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is there already, else a copy of the same values and strides."""
    if tensor.device.type == device.type:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def metadata_to(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """The same object if it is there already: backends plan once for each."""
    if metadata.seq_lens.device.type == device.type:
        return metadata
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return dataclasses.replace(metadata, **{name: getattr(metadata, name).to(device) for name in names})
