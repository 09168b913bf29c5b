"""A poisoned pool, sequences scattered over it, and the tolerances: what the kernel tests stand on.

Every slot that no live token owns holds NaN, the null block included, and every block-table entry that must not be
followed points at a block of NaN. So a kernel that reads one slot too many says so.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from devices import device_of, metadata_to, to_device
from torch import Tensor

from kernels import reference
from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata

# Inputs are exact in every dtype and all backends sum in float32, so what is left is the rounding of the output:
# half a unit in the last place, and the error of float32 sums.
TOLERANCES = {  # absolute, relative
    torch.float32: (4e-6, 4e-6),
    torch.float16: (2e-5, 2**-11 * 1.05),
    torch.bfloat16: (2e-5, 2**-8 * 1.02),
}
# Compiled for a GPU, matrix units take the softmax weights in the dtype of V: each is off by half a unit in its last
# place, and their sum by that times the sum of weight times |v|, which stays below 4 for standard normal values.
GPU_TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (4 * 2**-12, 2**-11 * 1.05),
    torch.bfloat16: (4 * 2**-9, 2**-8 * 1.02),
}
NULL_BLOCK, POISON_BLOCK = 0, 1


@dataclass
class World:
    """Sequences of known length whose K and V are in the pool; block ids of each in `tables`."""

    k_cache: Tensor
    v_cache: Tensor
    tables: list[list[int]]
    seq_lens: list[int]
    block_size: int
    num_q_heads: int
    scale: float
    window: int | None
    soft_cap: float | None

    def metadata(self, query_lens: list[int], seq_lens: list[int] | None = None) -> AttentionMetadata:
        """The last query_lens[s] of the first seq_lens[s] tokens. All that may not be read is poisoned in the table."""
        seq_lens = self.seq_lens if seq_lens is None else seq_lens
        tables = []
        for table, query_len, seq_len in zip(self.tables, query_lens, seq_lens, strict=True):
            first_live = 0 if self.window is None else max(0, seq_len - query_len - self.window + 1)
            row = [POISON_BLOCK if b < first_live // self.block_size else id_ for b, id_ in enumerate(table)]
            live_blocks = -(-seq_len // self.block_size)
            tables.append(row[:live_blocks] + [POISON_BLOCK] * (len(table) - live_blocks + 2))
        return AttentionMetadata.build(query_lens, seq_lens, tables, self.block_size)

    def pick(self, sequences: list[int]) -> World:
        """The world with only these sequences; the pool is shared."""
        return dataclasses.replace(
            self, tables=[self.tables[s] for s in sequences], seq_lens=[self.seq_lens[s] for s in sequences]
        )

    def attend(self, backend: AttentionBackend, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The result on the backend's device, whichever the arguments are on."""
        device = device_of(backend)
        q, k_cache, v_cache = (to_device(tensor, device) for tensor in (q, self.k_cache, self.v_cache))
        out = torch.full_like(q, float("nan"))
        backend.paged_attention(
            q, k_cache, v_cache, metadata_to(metadata, device),
            scale=self.scale, window=self.window, soft_cap=self.soft_cap, out=out,
        )  # fmt: skip
        return out

    def expected(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        return reference.paged_attention(
            q, self.k_cache, self.v_cache, metadata,
            scale=self.scale, window=self.window, soft_cap=self.soft_cap,
        )  # fmt: skip


def make_world(
    seq_lens: list[int],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
    seed: int = 0,
) -> World:
    """heads: (query heads, KV heads). Block ids are shuffled; K and V are standard normal."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    free = (torch.randperm(sum(counts), generator=generator) + 2).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, heads[1], block_size, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype)
    v_cache = torch.full(shape, float("nan"), dtype=dtype)
    for table, n in zip(tables, seq_lens, strict=True):
        for index, block in enumerate(table):
            live = min(block_size, n - index * block_size)
            for cache in (k_cache, v_cache):
                cache[block, :, :live] = torch.randn((heads[1], live, head_dim), generator=generator).to(dtype)
    return World(k_cache, v_cache, tables, seq_lens, block_size, heads[0], head_dim**-0.5, window, soft_cap)


def make_queries(world: World, num_tokens: int, seed: int = 1) -> Tensor:
    """[num_tokens, num_q_heads, D], cut out of a wider buffer as out of a fused qkv projection: rows are strided."""
    generator = torch.Generator().manual_seed(seed)
    width = world.num_q_heads + 2 * world.k_cache.shape[1]
    fused = torch.randn((num_tokens, width, world.k_cache.shape[3]), generator=generator)
    return fused.to(world.k_cache.dtype)[:, : world.num_q_heads]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of actual's dtype and device of the float64 result."""
    absolute, relative = (TOLERANCES if actual.is_cpu else GPU_TOLERANCES)[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=absolute, rtol=relative)


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
