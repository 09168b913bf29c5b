"""Writing into the paged cache on a CPU. Knows addresses; the Python side knows tensors."""

from __future__ import annotations

from kernels.cpu.jit import kernel
from kernels.cpu.vectors import copy_bytes, read_i64


@kernel
def write_rows(
    k, k_token, k_head, v, v_token, v_head, k_cache, v_cache, slots, num_tokens, num_slots, num_kv_heads, block_size,
    row_bytes,
):  # fmt: skip
    """Copy each token's K and V rows to its slot; slot -1 writes nothing. All int64; strides in bytes.

    Returns -1, or the first token whose slot the cache lacks (and which was not written, like all that follow).
    """
    head_bytes = block_size * row_bytes
    for token in range(num_tokens):
        slot = read_i64(slots + 8 * token)
        if slot == -1:
            continue
        if slot < 0 or slot >= num_slots:
            return token
        block = slot // block_size
        target = block * num_kv_heads * head_bytes + (slot - block * block_size) * row_bytes
        for head in range(num_kv_heads):
            copy_bytes(k_cache + target, k + token * k_token + head * k_head, row_bytes)
            copy_bytes(v_cache + target, v + token * v_token + head * v_head, row_bytes)
            target += head_bytes
    return -1
