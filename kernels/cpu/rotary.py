"""Head norms, rotation and cache write in one pass over a step's tokens. Knows addresses, not tensors.

A head is widened into scratch memory, normed and turned there in float32, and rounded once, on its way to where it
belongs: Q to its place in the row, K to its slot. With x = (left, right) the two halves of a head, rotation gives
(left cos - right sin, right cos + left sin) (Su et al. 2021, RoFormer; the half-split order is Hugging Face's).
RMSNorm(x) = x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019).

Half a head may be half a vector, so vectors run past the ends of what they are about: into the other half, which is
written after, and into the scratch memory's margin.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import part, work
from kernels.cpu.tiles import row_from_float, row_to_float
from kernels.cpu.vectors import (
    BF16,
    LANES,
    copy_bytes,
    fma,
    load_bf16,
    load_f32,
    mul,
    negate,
    read_double,
    read_i64,
    splat,
    store_bf16,
    store_f32,
    sum_lanes,
    write_i64,
)

# The arguments, words of eight bytes: addresses, counts, bytes, int64 unless said otherwise.
WORDS = (
    "bad_token",  # after a call: -1, or the first token whose slot the cache lacks (not touched, like all that follow)
    "qkv",
    "k_cache",
    "v_cache",
    "q_norm",  # weights; 0: no norm
    "k_norm",
    "positions",
    "slots",  # -1: K and V are not written
    "table",
    "row_bytes",
    "kind",
    "item_bytes",
    "num_tokens",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_positions",
    "num_slots",
    "block_size",
    "eps",  # float64
)
BAD_TOKEN, QKV, K_CACHE, V_CACHE, Q_NORM, K_NORM, POSITIONS, SLOTS, TABLE, ROW_BYTES, KIND, ITEM_BYTES, NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_POSITIONS, NUM_SLOTS, BLOCK_SIZE, EPS = range(len(WORDS))  # fmt: skip  # noqa: E501

ONE = np.float32(1.0)


def scratch_bytes(head_dim: int) -> int:
    """Scratch memory of ROTATE: a head before and after, angles, a margin of a vector behind each."""
    return 3 * 4 * (head_dim + LANES)


@part
def norm_head(head, weight, head_dim, eps):
    """RMSNorm of float32 [head_dim], in place."""
    sums = splat(np.float32(0.0))
    for d in range(0, head_dim, LANES):
        values = load_f32(head + 4 * d)
        sums = fma(values, values, sums)
    factor = splat(np.float32(ONE / np.sqrt(np.float32(sum_lanes(sums) / np.float32(head_dim) + eps))))
    for d in range(0, head_dim, LANES):
        store_f32(head + 4 * d, mul(mul(load_f32(head + 4 * d), factor), load_f32(weight + 4 * d)))


@part
def turn_head(head, turned, angles, half):
    """float32 [2 * half] at `head`, turned by the angles with these cosines, then sines, float32 [2 * half]."""
    for i in range(0, half, LANES):
        left, right = load_f32(head + 4 * i), load_f32(head + 4 * (half + i))
        cos, sin = load_f32(angles + 4 * i), load_f32(angles + 4 * (half + i))
        store_f32(turned + 4 * i, fma(left, cos, negate(mul(right, sin))))
    for i in range(0, half, LANES):
        left, right = load_f32(head + 4 * i), load_f32(head + 4 * (half + i))
        cos, sin = load_f32(angles + 4 * i), load_f32(angles + 4 * (half + i))
        store_f32(turned + 4 * (half + i), fma(left, sin, mul(right, cos)))


@part
def put_head(source, target, weight, angles, scratch, head_dim, kind, eps):
    """The head at `source`, normed unless weight is 0 and turned, to `target`, which may be the same."""
    half = head_dim // 2
    if kind == BF16 and weight == 0 and half % LANES == 0:  # the usual case needs no scratch memory
        for i in range(0, half, LANES):
            left, right = load_bf16(source + 2 * i), load_bf16(source + 2 * (half + i))
            cos, sin = load_f32(angles + 4 * i), load_f32(angles + 4 * (half + i))
            store_bf16(target + 2 * i, fma(left, cos, negate(mul(right, sin))))
            store_bf16(target + 2 * (half + i), fma(left, sin, mul(right, cos)))
        return
    head, turned = scratch, scratch + 4 * (head_dim + LANES)
    row_to_float(source, head, head_dim, kind, ONE)
    if weight != 0:
        norm_head(head, weight, head_dim, eps)
    turn_head(head, turned, angles, half)
    row_from_float(turned, target, head_dim, kind, ONE)


@work
def rotate_and_write(a, scratch, owner):
    """Q of each row is turned in place; K, turned, and V are put at the token's slot. a: address of WORDS.

    A position outside of the table counts as the nearest in it.
    """
    qkv, k_cache, v_cache = read_i64(a + 8 * QKV), read_i64(a + 8 * K_CACHE), read_i64(a + 8 * V_CACHE)
    q_norm, k_norm, positions = read_i64(a + 8 * Q_NORM), read_i64(a + 8 * K_NORM), read_i64(a + 8 * POSITIONS)
    slots, table, row_bytes = read_i64(a + 8 * SLOTS), read_i64(a + 8 * TABLE), read_i64(a + 8 * ROW_BYTES)
    kind, item_bytes, head_dim = read_i64(a + 8 * KIND), read_i64(a + 8 * ITEM_BYTES), read_i64(a + 8 * HEAD_DIM)
    num_heads, num_kv_heads = read_i64(a + 8 * NUM_HEADS), read_i64(a + 8 * NUM_KV_HEADS)
    num_positions, num_slots = read_i64(a + 8 * NUM_POSITIONS), read_i64(a + 8 * NUM_SLOTS)
    block_size, eps = read_i64(a + 8 * BLOCK_SIZE), read_double(a + 8 * EPS)
    head_bytes = head_dim * item_bytes
    angles = scratch + 8 * (head_dim + LANES)
    small = np.float32(eps)
    write_i64(a + 8 * BAD_TOKEN, -1)
    for token in range(read_i64(a + 8 * NUM_TOKENS)):
        slot = read_i64(slots + 8 * token)
        if slot < -1 or slot >= num_slots:
            write_i64(a + 8 * BAD_TOKEN, token)
            return 0
        position = min(max(read_i64(positions + 8 * token), 0), num_positions - 1)
        copy_bytes(angles, table + position * 4 * head_dim, 4 * head_dim)
        source = qkv + token * row_bytes
        for _ in range(num_heads):
            put_head(source, source, q_norm, angles, scratch, head_dim, kind, small)
            source += head_bytes
        if slot == -1:
            continue
        block = slot // block_size
        target = (block * num_kv_heads * block_size + slot - block * block_size) * head_bytes
        for _ in range(num_kv_heads):
            put_head(source, k_cache + target, k_norm, angles, scratch, head_dim, kind, small)
            copy_bytes(v_cache + target, source + num_kv_heads * head_bytes, head_bytes)
            source += head_bytes
            target += block_size * head_bytes
    return 1


ROTATE = rotate_and_write.address
