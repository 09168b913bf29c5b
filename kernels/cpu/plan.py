"""What attention does in a step, as a list of work items: made once, for all layers and KV heads. Knows no K, V or q.

An item is up to rows // group query tokens, all of one sequence, or one each of sequences whose block tables begin with
the same blocks. An item is a list of segments: some of its queries against a range of keys. Where a prefix is shared,
its segment comes first and has all of them, then come those that fewer share, then every sequence's own keys. So each
query meets its keys in order, whoever shares them, and a K/V tile is read once for all who do:

    A  1 2 3 4 5 6 a        segments: 1 2 (A B C), 3 4 5 6 (A B), a (A), b (B), 3 4 c (C)
    B  1 2 3 4 5 6 b
    C  1 2 7 8 c

Shared are whole tiles before the sequence's last token, of sequences with one token in this step (decode) that see all
of their keys; a window that hides some, longer chunks and prompts are never shared.
"""

from __future__ import annotations

import torch

from kernels.cpu.jit import kernel, part
from kernels.cpu.softmax import TILE
from kernels.cpu.vectors import read_i32, read_i64, write_i64
from kernels.metadata import AttentionMetadata

# Of a segment, int64: the sequence in whose block table the keys are found, its queries (a range of the plan's list of
# tokens), the position of the first of them, the keys, and the window (0: none).
SEQ, FIRST, COUNT, POSITION, BEGIN, END, WINDOW = (8 * word for word in range(7))
SEGMENT_BYTES = 8 * 7


@part
def _write_segment(at, seq, first, count, position, begin, end, window):
    write_i64(at + SEQ, seq)
    write_i64(at + FIRST, first)
    write_i64(at + COUNT, count)
    write_i64(at + POSITION, position)
    write_i64(at + BEGIN, begin)
    write_i64(at + END, end)
    write_i64(at + WINDOW, window)
    return at + SEGMENT_BYTES


@part
def read_segment(segment, table, table_stride):
    """(Its row of the block table, position of its first query, queries, first key, one past the last, window.)"""
    return (
        table + read_i64(segment + SEQ) * table_stride, read_i64(segment + POSITION), read_i64(segment + COUNT),
        read_i64(segment + BEGIN), read_i64(segment + END), read_i64(segment + WINDOW),
    )  # fmt: skip


@part
def _sharable(seq_len):
    """Keys of a sequence that others may share: whole tiles, and the last token is not among them."""
    return max(seq_len - 1, 0) // TILE * TILE


@part
def _common_blocks(a, b, count):
    """Of the block tables at a and b: how many of the first `count` entries are equal before one differs."""
    index = 0
    while index < count and read_i32(a + 4 * index) == read_i32(b + 4 * index):
        index += 1
    return index


@part
def _compare(a, b, a_keys, b_keys, block_size):
    """Of two block tables: (negative if a's sharable blocks come before b's in the order of lists, the keys shared)."""
    a_blocks = (a_keys + block_size - 1) // block_size
    b_blocks = (b_keys + block_size - 1) // block_size
    common = _common_blocks(a, b, min(a_blocks, b_blocks))
    shared = min(common * block_size, a_keys, b_keys) // TILE * TILE
    if common < a_blocks and common < b_blocks:
        return int(read_i32(a + 4 * common)) - int(read_i32(b + 4 * common)), shared
    return a_blocks - b_blocks, shared


@part
def _insert_sorted(order, count, seq, seq_lens, table, table_stride, block_size):
    """Put seq into the list `order` of `count` sequences, which is in the order of their block tables."""
    keys = _sharable(int(read_i32(seq_lens + 4 * seq)))
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        other = read_i64(order + 8 * middle)
        other_keys = _sharable(int(read_i32(seq_lens + 4 * other)))
        sign, _ = _compare(table + seq * table_stride, table + other * table_stride, keys, other_keys, block_size)
        if sign < 0:
            high = middle
        else:
            low = middle + 1
    for index in range(count, low, -1):
        write_i64(order + 8 * index, read_i64(order + 8 * (index - 1)))
    write_i64(order + 8 * low, seq)


@part
def _write_group(at, tokens, first, order, shared, begin, end, query_starts, seq_lens, window):
    """Segments of the item of sequences order[begin .. end - 1], whose queries start at `first` of the tokens.

    shared: keys in common with the sequence before. A sequence's keys up to those are in segments that it is part of
    already; then it opens one for each number of followers that share more, and ends with its own.
    """
    for i in range(begin, end):
        seq = read_i64(order + 8 * i)
        seq_len = int(read_i32(seq_lens + 4 * seq))
        write_i64(tokens + 8 * (first + i - begin), int(read_i32(query_starts + 4 * seq)))
        done = read_i64(shared + 8 * i) if i > begin else 0
        while True:
            stop = i + 1
            reach = seq_len
            while stop < end and read_i64(shared + 8 * stop) > done:
                reach = min(reach, read_i64(shared + 8 * stop))
                stop += 1
            if stop == i + 1:
                break
            at = _write_segment(at, seq, first + i - begin, stop - i, reach, done, reach, 0)
            done = reach
        at = _write_segment(at, seq, first + i - begin, 1, seq_len - 1, done, seq_len, window)
    return at


@kernel
def plan_items(
    segments, items, tokens, order, shared, query_starts, seq_lens, table, table_stride, table_blocks, num_seqs,
    num_tokens, block_size, queries_per_item, group_limit, window,
):  # fmt: skip
    """Write the segments, where the segments of each item begin (and the last ones end), and the items' query tokens.

    All are addresses and numbers, int64; order and shared, num_seqs words each, are scratch memory. group_limit: how
    many sequences may be in an item. Returns the number of items, and a sequence whose tokens exceed the table or the
    step or are another's, which is passed over, or -1.
    """
    num_items = 0
    num_queries = 0
    bad_seq = -1
    alone = 0  # sequences of one token, in `order`
    done = 0
    at = segments
    for seq in range(num_seqs):
        start = int(read_i32(query_starts + 4 * seq))
        stop = int(read_i32(query_starts + 4 * (seq + 1)))
        seq_len = int(read_i32(seq_lens + 4 * seq))
        if start < done or stop > num_tokens or seq_len > table_blocks * block_size:
            bad_seq = seq
            continue
        done = max(done, stop)
        if stop - start == 1 and (window == 0 or seq_len <= window):
            _insert_sorted(order, alone, seq, seq_lens, table, table_stride, block_size)
            alone += 1
            continue
        for token in range(start, stop, queries_per_item):
            count = min(queries_per_item, stop - token)
            position = seq_len - (stop - token)
            begin = max(0, position - window + 1) if window > 0 else 0
            write_i64(items + 8 * num_items, at)
            num_items += 1
            at = _write_segment(at, seq, num_queries, count, position, begin, position + count, window)
            for i in range(count):
                write_i64(tokens + 8 * (num_queries + i), token + i)
            num_queries += count

    for i in range(1, alone):
        a, b = read_i64(order + 8 * (i - 1)), read_i64(order + 8 * i)
        a_keys, b_keys = _sharable(int(read_i32(seq_lens + 4 * a))), _sharable(int(read_i32(seq_lens + 4 * b)))
        _, keys = _compare(table + a * table_stride, table + b * table_stride, a_keys, b_keys, block_size)
        write_i64(shared + 8 * i, keys)
    first = 0
    while first < alone:
        last = first + 1
        while last < alone and read_i64(shared + 8 * last) > 0:
            last += 1
        pieces = (last - first + group_limit - 1) // group_limit
        size = (last - first + pieces - 1) // pieces
        for begin in range(first, last, size):
            end = min(begin + size, last)
            write_i64(items + 8 * num_items, at)
            num_items += 1
            at = _write_group(at, tokens, num_queries, order, shared, begin, end, query_starts, seq_lens, window)
            num_queries += end - begin
        first = last
    write_i64(items + 8 * num_items, at)
    return num_items, bad_seq


class WorkPlan:
    """The plan of the last step it was made for, in memory that is used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64)
        self.items = self.tokens = 0  # addresses: of num_items + 1 addresses of segments, and of the query tokens
        self.num_items = 0
        self.bad_seq = -1
        """A sequence whose tokens exceed the table or the step, which has no items; -1: there is none."""

    def make(
        self,
        metadata: AttentionMetadata,
        block_size: int,
        queries_per_item: int,
        num_kv_heads: int,
        max_threads: int,
        window: int,
    ) -> None:
        """The values of the metadata's tensors are read now, and not again in this step. A window of 0 means none."""
        num_seqs, num_tokens, table = metadata.num_seqs, metadata.num_tokens, metadata.block_table
        most_items = num_seqs + num_tokens // queries_per_item
        words = (SEGMENT_BYTES // 8 * (most_items + num_seqs), most_items + 1, num_tokens, num_seqs, num_seqs)
        if self._memory.numel() < sum(words):
            self._memory = torch.empty(sum(words), dtype=torch.int64)
        segments = self._memory.data_ptr()
        self.items = segments + 8 * words[0]
        self.tokens = self.items + 8 * words[1]
        order = self.tokens + 8 * words[2]
        group_limit = queries_per_item
        if max_threads > 1:  # every thread should get some items
            group_limit = max(1, min(group_limit, num_seqs * num_kv_heads // (2 * max_threads)))
        self.num_items, self.bad_seq = plan_items(
            segments, self.items, self.tokens, order, order + 8 * words[3],
            metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(), table.data_ptr(), table.stride(0) * 4,
            table.shape[1], num_seqs, num_tokens, block_size, queries_per_item, group_limit, window,
        )  # fmt: skip
