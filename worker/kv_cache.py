"""The memory that holds keys and values: how many blocks fit, and the tensors.

A block id is worth the same bytes in every cache group: layer j of each group lies in the same tensor j, and a block
belongs to one group at a time. Groups with fewer layers leave tensors of theirs unused.
"""

from __future__ import annotations

import logging
import secrets

import psutil
import torch
from torch import Tensor

from kernels.cpu import memory
from protocol.config import EngineConfig, parse_bytes
from protocol.messages import KVCacheGroupSpec

LayerScales = tuple[Tensor, Tensor]
"""What K and V of a quantised layer are multiplied by, each float32 [num_kv_heads]."""

_LOG = logging.getLogger("worker")

AUTO_SHARE = 0.4
"""Share of the free memory that `--kv-memory auto` divides among the workers of this machine."""

GPU_SHARE = 0.9
"""Share of a GPU's memory that weights and KV cache of all its workers may take."""


class KVMemoryError(RuntimeError):
    """The memory named or free holds no usable cache; the message says how much one block needs."""


def slot_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of one token position over all layers: 2 · L · N_kv · D · e (keys and values)."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


class KVCache:
    """K and V per layer, each [num_blocks, num_kv_heads, block_size, head_dim]. `memory_id` names this allocation."""

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: list[LayerScales] | None = None,
    ):
        """dtype: of the cache; scales: per layer, of a quantised one."""
        self.num_blocks = num_blocks
        self.memory_id = secrets.token_hex(8)
        shape = (num_blocks, groups[0].num_kv_heads, block_size, groups[0].head_dim)
        depth = max(len(group.layer_ids) for group in groups)
        # empty, not zeros: nothing is read before it is written, and pages that no block uses are never touched
        shared = [(_empty(shape, dtype, device), _empty(shape, dtype, device)) for _ in range(depth)]
        layers: dict[int, tuple[Tensor, ...]] = {}
        for group in groups:
            layers.update(zip(group.layer_ids, shared, strict=False))
        self.layers = [layers[layer] + (scales[layer] if scales else ()) for layer in sorted(layers)]
        """What the model is given: K and V of each layer, and their scales if they are quantised."""
        self.tensors = [tensor for pair in shared for tensor in pair]
        """Every tensor once, for whole-block copies."""
        self.ahead = None
        """Of a cache in large pages: makes them ready."""
        if device.type == "cpu" and self.tensors[0].nbytes >= memory.LARGE_PAGE:
            self.ahead = memory.Ahead(self.tensors)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return memory.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


def block_bytes(groups: tuple[KVCacheGroupSpec, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block id is worth."""
    depth = max(len(group.layer_ids) for group in groups)
    return block_size * slot_bytes(depth, groups[0].num_kv_heads, groups[0].head_dim, dtype.itemsize)


def gpu_budget(free: int, total: int, own: int, sharers: int) -> int:
    """Bytes for KV of one of `sharers` workers on a GPU of `total` bytes that holds `own` bytes of it already.

    Counted from its share, not from what is free right now, since the others are loading at the same time. A tenth
    stays for activations and recorded steps.
    """
    return max(0, min(int(total * GPU_SHARE / sharers) - own, int(free * GPU_SHARE)))


def blocks_that_fit(
    config: EngineConfig, groups: tuple[KVCacheGroupSpec, ...], dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks, the null block included, for `--kv-memory`; with auto, what is free bounds what could be used at most.

    Raises KVMemoryError when not even one usable block fits.
    """
    each = block_bytes(groups, config.block_size, dtype)
    if config.kv_memory == "auto":
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            sharers = -(-config.workers // torch.cuda.device_count())
            free = gpu_budget(free, total, torch.cuda.memory_allocated(device), sharers)
        else:
            free = psutil.virtual_memory().available * AUTO_SHARE / config.workers
        most = len(groups) * config.max_num_seqs * -(-config.max_model_len // config.block_size) + 1
        num_blocks = min(int(free) // each, most)
    else:
        num_blocks = parse_bytes(config.kv_memory) // each
    if num_blocks < 2:
        raise KVMemoryError(
            f"KV memory ({config.kv_memory}) holds {num_blocks} blocks; at least 2 of {each} bytes are needed"
        )
    _LOG.info("KV cache: %d blocks of %d tokens, %.2f GiB", num_blocks, config.block_size, num_blocks * each / 2**30)
    return num_blocks
