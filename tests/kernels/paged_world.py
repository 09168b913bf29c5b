"""A poisoned pool, sequences scattered over it, and the tolerances: what the kernel tests stand on.

Every slot that no live token owns holds NaN (in an int8 cache, which has none, the greatest number), the null block
included, and every block-table entry that must not be followed is 2^30. So a kernel that reads one slot too many says
so.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from devices import device_of, metadata_to, to_device
from torch import Tensor

from kernels import reference
from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS


class Tolerance(NamedTuple):
    """|actual - expected| may be absolute + relative * |expected|; triton is added to `absolute` for its kernels."""

    absolute: float
    relative: float
    triton: float


# By the dtype of q and out. Inputs are exact in every dtype, those of a quantised cache too (float64 sees the same
# numbers), and all backends sum in float32. What is left is the rounding of the output, half a unit in the last place,
# and the error of float32 sums. The Triton kernels also round the weights to the dtype before they multiply V, as the
# tensor cores ask for: half a unit of each, times the sum of weight times |V|; and a GPU's exp2 is off by some units.
TOLERANCES = {
    torch.float32: Tolerance(4e-6, 4e-6, 6e-6),
    torch.float16: Tolerance(2e-5, 2**-11 * 1.05, 2**-11),
    torch.bfloat16: Tolerance(2e-5, 2**-8 * 1.02, 2**-8),
}
POISON_BLOCK = 1 << 30


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
    dtype: torch.dtype  # of q and out
    features: dict  # further arguments of paged_attention: window, soft_cap, causal, sinks, k_scale, v_scale

    def metadata(self, query_lens: list[int], seq_lens: list[int] | None = None) -> AttentionMetadata:
        """The last query_lens[s] of the first seq_lens[s] tokens. All that may not be read is poisoned in the table."""
        seq_lens = self.seq_lens if seq_lens is None else seq_lens
        tables = []
        for table, query_len, seq_len in zip(self.tables, query_lens, seq_lens, strict=True):
            window = self.features.get("window")
            first_live = 0 if window is None else max(0, seq_len - query_len - window + 1)
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
        arguments = {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in self.features.items()}
        backend.paged_attention(
            q, k_cache, v_cache, metadata_to(metadata, device), scale=self.scale, out=out, **arguments
        )  # fmt: skip
        return out

    def expected(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        return reference.paged_attention(q, self.k_cache, self.v_cache, metadata, scale=self.scale, **self.features)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, *, sliced: bool = False) -> Tensor:
    """A cache of NaN (or 127). sliced: every third block, and all heads but the first, of a bigger one."""
    big = (3 * shape[0], shape[1] + 1, *shape[2:]) if sliced else shape
    poison = 127 if dtype is torch.int8 else float("nan")
    pool = torch.full(big, poison, dtype=torch.float32).to(dtype)
    return pool[1::3, 1:] if sliced else pool


def make_world(
    seq_lens: list[int],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    sinks: bool = False,
    sliced: bool = False,
    seed: int = 0,
    **features: object,
) -> World:
    """heads: (query heads, KV heads). Block ids are shuffled; K and V are standard normal, sinks too.

    features: window, soft_cap, causal. kv_dtype: of a quantised cache; each KV head gets scales of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    cache_dtype = kv_dtype or dtype
    shape = (sum(counts) + 1, heads[1], block_size, head_dim)
    k_cache, v_cache = (poisoned(shape, cache_dtype, sliced=sliced) for _ in range(2))
    if sinks:
        features["sinks"] = torch.randn(heads[0], generator=generator)
    if cache_dtype in LIMITS:
        for name in ("k_scale", "v_scale"):
            features[name] = torch.rand(heads[1], generator=generator) * 0.02 + 0.02
    tokens = [(s, p) for s, n in enumerate(seq_lens) for p in range(n)]
    kv = torch.randn((2, len(tokens), heads[1], head_dim), generator=generator).to(dtype)
    slots = [reference.slot_of(tables[s], p, block_size) for s, p in tokens]
    scales = {name: features.get(name) for name in ("k_scale", "v_scale")}
    reference.write_kv(kv[0], kv[1], k_cache, v_cache, torch.tensor(slots, dtype=torch.int64), **scales)
    return World(k_cache, v_cache, tables, seq_lens, block_size, heads[0], head_dim**-0.5, dtype, features)


def make_queries(world: World, num_tokens: int, seed: int = 1) -> Tensor:
    """[num_tokens, num_q_heads, D], cut out of a wider buffer as out of a fused qkv projection: rows are strided."""
    generator = torch.Generator().manual_seed(seed)
    width = world.num_q_heads + 2 * world.k_cache.shape[1]
    fused = torch.randn((num_tokens, width, world.k_cache.shape[3]), generator=generator)
    return fused.to(world.dtype)[:, : world.num_q_heads]


def assert_close(actual: Tensor, expected: Tensor, backend: AttentionBackend) -> None:
    """Within the tolerance of actual's dtype of the float64 result."""
    absolute, relative, triton = TOLERANCES[actual.dtype]
    if backend.name == "triton":
        absolute += triton
    torch.testing.assert_close(actual.cpu().double(), expected, atol=absolute, rtol=relative)


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(integers[tensor.element_size()])
