"""Paged attention on a CPU: one kernel for prefill, chunks and decode. Knows addresses; the Python side knows tensors.

The work items are those of `plan`, times the KV heads. Rows of an item are all query heads of its queries that share
the KV head, so each loaded K/V tile serves them all. Tiles of TILE keys lie at multiples of TILE of the *absolute*
position, and the softmax is online (running maximum and sum per row: Milakov and Gimelshein 2018).

Each row's arithmetic is the same sequence of operations whatever other rows, sequences or chunks are computed with
it: tiles it does not see leave it untouched to the bit. So alone, in a batch, with a shared prefix and in chunks give
equal bits. Few rows, as in decode, take another form (`few_rows`) with the same operations on each number.

Scores are kept times log2(e), for exp2. With a soft cap c, q is scaled by 2 log2(e) scale / c instead, and the score is
c log2(e) tanh_half of the product.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.attention_rows import begin_rows, finish_rows, row_bytes
from kernels.cpu.concurrency import raise_to, read_shared
from kernels.cpu.few_rows import attend_few, few_bytes, is_few
from kernels.cpu.jit import work
from kernels.cpu.many_rows import attend_many, many_bytes
from kernels.cpu.plan import COUNT, FIRST, SEGMENT_BYTES, SEQ
from kernels.cpu.team import claim
from kernels.cpu.vectors import read_double, read_i64

ROWS = 96  # at most, unless one token has more query heads to a KV head

# The arguments of ATTEND, words of eight bytes: addresses, counts, strides in bytes, int64 unless said otherwise.
WORDS = (
    "counter",  # items that were claimed; the caller sets it to 0
    "bad_seq",  # the caller sets it to the plan's. After that: that one, or a greater sequence whose block table names
    # a block that the cache lacks; nothing outside of the cache was touched
    "present",  # address of an int64: about how many threads claim, hence which item one will probably claim next
    "q",
    "out",
    "k_cache",
    "v_cache",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    "num_blocks",
    "num_kv_heads",
    "block_size",
    "head_dim",
    "kind",  # of elements, `vectors`
    "item_bytes",
    "group",
    "rows_capacity",  # `rows_of` the group
    "items",  # of the plan, and so are the next two
    "tokens",
    "num_items",
    "table",
    "table_stride",
    "scale",  # float64
    "soft_cap",  # float64; 0: none
)
COUNTER, BAD_SEQ, PRESENT, Q, OUT, K_CACHE, V_CACHE, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, KIND, ITEM_BYTES, GROUP, ROWS_CAPACITY, ITEMS, TOKENS, NUM_ITEMS, TABLE, TABLE_STRIDE, SCALE, SOFT_CAP = range(len(WORDS))  # fmt: skip  # noqa: E501


def rows_of(group: int) -> int:
    """Rows of a work item at most, for `group` query heads to a KV head."""
    return max(ROWS, group)


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch memory of one thread: the rows, then a workspace."""
    capacity = rows_of(group)
    return capacity * row_bytes(head_dim) + max(many_bytes(capacity, head_dim), few_bytes(head_dim))


@work
def attend(a, scratch, owner):
    """Attend for the work items that this thread claims; how many it did. a: address of WORDS; owner: see `team`."""
    counter = a + 8 * COUNTER
    threads = read_shared(read_i64(a + 8 * PRESENT))
    q = read_i64(a + 8 * Q)
    out = read_i64(a + 8 * OUT)
    k_cache = read_i64(a + 8 * K_CACHE)
    v_cache = read_i64(a + 8 * V_CACHE)
    q_token = read_i64(a + 8 * Q_TOKEN)
    q_head = read_i64(a + 8 * Q_HEAD)
    out_token = read_i64(a + 8 * OUT_TOKEN)
    out_head = read_i64(a + 8 * OUT_HEAD)
    num_blocks = read_i64(a + 8 * NUM_BLOCKS)
    num_kv_heads = read_i64(a + 8 * NUM_KV_HEADS)
    block_size = read_i64(a + 8 * BLOCK_SIZE)
    head_dim = read_i64(a + 8 * HEAD_DIM)
    kind = read_i64(a + 8 * KIND)
    item_bytes = read_i64(a + 8 * ITEM_BYTES)
    group = read_i64(a + 8 * GROUP)
    rows_capacity = read_i64(a + 8 * ROWS_CAPACITY)
    items = read_i64(a + 8 * ITEMS)
    tokens = read_i64(a + 8 * TOKENS)
    total = read_i64(a + 8 * NUM_ITEMS) * num_kv_heads
    table = read_i64(a + 8 * TABLE)
    table_stride = read_i64(a + 8 * TABLE_STRIDE)
    scale, soft_cap = read_double(a + 8 * SCALE), read_double(a + 8 * SOFT_CAP)
    q_factor = np.float32(scale * math.log2(math.e))
    if soft_cap > 0.0:
        q_factor = np.float32(2.0 * scale * math.log2(math.e) / soft_cap)
    score_cap = np.float32(soft_cap * math.log2(math.e))
    head_bytes = block_size * head_dim * item_bytes
    block_bytes = num_kv_heads * head_bytes
    workspace = scratch + rows_capacity * row_bytes(head_dim)
    done = 0
    claimed = claim(counter, owner)
    while claimed < total:
        item = claimed // num_kv_heads
        head = claimed - item * num_kv_heads
        segment = read_i64(items + 8 * item)
        last = read_i64(items + 8 * (item + 1))
        following = min(claimed + threads, total - 1)
        first_query = read_i64(segment + FIRST)
        num_queries = read_i64(segment + COUNT)  # of the first segment: all of the item
        item_tokens = tokens + 8 * first_query
        q_at = q + head * group * q_head
        begin_rows(
            scratch, rows_capacity, q_at, q_token, q_head, item_tokens, num_queries, group, head_dim, kind, q_factor
        )
        while segment < last:
            next_segment = segment + SEGMENT_BYTES
            next_head = head
            if next_segment == last:
                next_segment = read_i64(items + 8 * (following // num_kv_heads))
                next_head = following % num_kv_heads
            first_row = (read_i64(segment + FIRST) - first_query) * group
            if is_few(read_i64(segment + COUNT) * group, head_dim, kind, block_size):
                valid = attend_few(
                    scratch, workspace, rows_capacity, first_row, segment, next_segment, table, table_stride, k_cache,
                    v_cache, group, head_dim, num_blocks, block_size, block_bytes, head * head_bytes,
                    next_head * head_bytes, score_cap,
                )  # fmt: skip
            else:
                valid = attend_many(
                    scratch, workspace, rows_capacity, first_row, segment, next_segment, table, table_stride, k_cache,
                    v_cache, group, head_dim, kind, item_bytes, num_blocks, block_size, block_bytes, head * head_bytes,
                    next_head * head_bytes, score_cap,
                )  # fmt: skip
            if not valid:
                raise_to(a + 8 * BAD_SEQ, read_i64(segment + SEQ))
            segment += SEGMENT_BYTES
        finish_rows(
            scratch, rows_capacity, out + head * group * out_head, out_token, out_head, item_tokens, num_queries,
            group, head_dim, kind,
        )  # fmt: skip
        done += 1
        claimed = claim(counter, owner)
    return done


ATTEND = attend.address
