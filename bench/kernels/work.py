"""What a kernel must do at least, and the time that takes at the rates of this machine. Pure arithmetic.

Bytes: every input read once, every output written once. Operations: a multiplication and an addition for each product.
The floor is the longer of bytes over the copy bandwidth (bytes read plus bytes written of a large copy) and
operations over the rate of a large matrix product, both measured in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}


@dataclass(frozen=True)
class Work:
    """The least that a computation moves and calculates."""

    bytes: int
    flops: int
    dtype: str  # of the products

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.dtype)


@dataclass(frozen=True)
class Ceilings:
    """Rates that this machine reached on the simplest work of a kind."""

    copy_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]  # by dtype

    def best(self, other: Ceilings) -> Ceilings:
        """Of two measurements the greater of each rate: other work on the machine only ever lowers one."""
        dtypes = self.matmul_flops_per_s.keys() | other.matmul_flops_per_s.keys()
        return Ceilings(
            max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            {
                dtype: max(self.matmul_flops_per_s.get(dtype, 0.0), other.matmul_flops_per_s.get(dtype, 0.0))
                for dtype in sorted(dtypes)
            },
        )

    def memory_us(self, work: Work) -> float:
        return work.bytes / self.copy_bytes_per_s * 1e6

    def compute_us(self, work: Work) -> float | None:
        """None: the rate of this dtype was not measured, and there are operations."""
        if not work.flops:
            return 0.0
        rate = self.matmul_flops_per_s.get(work.dtype)
        return None if rate is None else work.flops / rate * 1e6

    def floor_us(self, work: Work) -> float | None:
        """No version runs much faster than this."""
        compute = self.compute_us(work)
        return None if compute is None else max(self.memory_us(work), compute)


@dataclass(frozen=True)
class Heads:
    """The heads of one attention layer."""

    num_q: int
    num_kv: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q // self.num_kv

    def __str__(self) -> str:
        return f"{self.num_q}/{self.num_kv}x{self.head_dim}"


def visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """(query, key) pairs of one sequence: the query at position p sees the last `window` of the p + 1 keys up to it."""
    first = seq_len - query_len
    if window is None or window >= seq_len:
        return query_len * first + query_len * (query_len + 1) // 2
    whole = max(0, min(query_len, window - 1 - first))  # queries that see fewer keys than the window holds
    return whole * first + whole * (whole + 1) // 2 + (query_len - whole) * window


def visible_keys(query_len: int, seq_len: int, window: int | None) -> int:
    """Keys of one sequence that at least one of its queries sees."""
    return seq_len if window is None else min(seq_len, query_len + window - 1)


def attention_work(
    heads: Heads, query_lens: Sequence[int], seq_lens: Sequence[int], window: int | None, dtype: str, kv_dtype: str
) -> Work:
    """K and V of every visible key read once, q read, the result written; 4 D operations a pair and query head."""
    lens = list(zip(query_lens, seq_lens, strict=True))
    keys = sum(visible_keys(q, n, window) for q, n in lens)
    pairs = sum(visible_pairs(q, n, window) for q, n in lens)
    kv_bytes = 2 * keys * heads.num_kv * heads.head_dim * BYTES_OF[kv_dtype]
    q_and_out_bytes = 2 * sum(query_lens) * heads.num_q * heads.head_dim * BYTES_OF[dtype]
    return Work(kv_bytes + q_and_out_bytes, 4 * pairs * heads.num_q * heads.head_dim, dtype)


def gemm_work(rows: int, inputs: int, outputs: int, dtype: str) -> Work:
    """[rows, inputs] x [inputs, outputs]."""
    elements = inputs * outputs + rows * inputs + rows * outputs
    return Work(elements * BYTES_OF[dtype], 2 * rows * inputs * outputs, dtype)


def write_kv_work(num_tokens: int, heads: Heads, dtype: str, kv_dtype: str) -> Work:
    """K and V of each token and its slot (int64) read, K and V written."""
    values = 2 * num_tokens * heads.num_kv * heads.head_dim
    return Work(values * (BYTES_OF[dtype] + BYTES_OF[kv_dtype]) + 8 * num_tokens, 0, dtype)


def copy_blocks_work(num_blocks: int, num_caches: int, block_size: int, heads: Heads, kv_dtype: str) -> Work:
    """Whole blocks of `num_caches` tensors (K or V of a layer) read and written."""
    block_bytes = block_size * heads.num_kv * heads.head_dim * BYTES_OF[kv_dtype]
    return Work(2 * num_blocks * num_caches * block_bytes, 0, kv_dtype)


def slot_mapping_work(num_tokens: int, num_seqs: int) -> Work:
    """A slot (int64) written for each token, its block id (int32) read; three int32 of each sequence read."""
    return Work(12 * num_tokens + 12 * num_seqs, 0, "float32")


@dataclass(frozen=True)
class ModelShape:
    """A Llama-family decoder, as far as its cost goes."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: Heads
    vocab: int
    tied: bool  # the output head is the embedding

    def gemms(self) -> dict[str, tuple[int, int]]:
        """The matrix products of a layer, and the output head: name → (inputs, outputs)."""
        q, kv = self.heads.num_q * self.heads.head_dim, self.heads.num_kv * self.heads.head_dim
        return {
            "qkv": (self.hidden, q + 2 * kv),
            "output": (q, self.hidden),
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
            "head": (self.hidden, self.vocab),
        }

    @property
    def num_products(self) -> int:
        """Weights that every token is multiplied with: all but the embedding (of which a step reads a row a token)."""
        *layer, head = [inputs * outputs for inputs, outputs in self.gemms().values()]
        return self.num_layers * sum(layer) + head


def elementwise_work(op: str, model: ModelShape, rows: int, dtype: str) -> Work:
    """What add_norm, silu_and_mul and rotate_and_write_kv move; their arithmetic does not count."""
    size, heads = BYTES_OF[dtype], model.heads
    if op == "add_norm":  # the float32 residual read and written, x read, the result written, the weight read
        return Work(rows * model.hidden * (8 + 2 * size) + 4 * model.hidden, 0, dtype)
    if op == "silu_and_mul":
        return Work(3 * rows * model.intermediate * size, 0, dtype)
    if op == "rotate_and_write_kv":  # q, k, v read and written, a row of angles and a position and slot for each token
        elements = (heads.num_q + 2 * heads.num_kv) * heads.head_dim
        return Work(rows * (2 * elements * size + 4 * heads.head_dim + 16), 0, dtype)
    raise ValueError(f"no work is known of {op!r}")


def decode_step_work(model: ModelShape, batch: int, seq_len: int, dtype: str, kv_dtype: str) -> Work:
    """One token for each of `batch` sequences of `seq_len` tokens: every weight once, K and V of every layer once."""
    weights = Work(model.num_products * BYTES_OF[dtype], 2 * batch * model.num_products, dtype)
    layer = attention_work(model.heads, [1] * batch, [seq_len] * batch, None, dtype, kv_dtype)
    layers = Work(model.num_layers * layer.bytes, model.num_layers * layer.flops, dtype)
    return weights + layers
