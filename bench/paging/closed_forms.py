"""What can be worked out without running anything. Lengths and sizes in tokens, one slot each; B is the block size.

Sources: ⌈S/B⌉ blocks a request, as in Kwon et al. 2023, section 4; the rest is sums over a load's lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.paging.load import Item


def tail_waste(length: int, block_size: int) -> int:
    """Slots of the last block that hold nothing: ⌈S/B⌉·B - S, at least 0 and below B."""
    return -length % block_size


def mean_tail_waste_uniform(block_size: int) -> float:
    """(B-1)/2: the mean of `tail_waste` where lengths take every rest modulo B alike."""
    return (block_size - 1) / 2


def reserve_waste(lengths: Sequence[int], longest: int) -> float:
    """1 - mean/max: the share of reserved slots that hold nothing."""
    return 1 - sum(lengths) / len(lengths) / longest


def lifetime_lengths(items: Iterable[Item]) -> tuple[int, int]:
    """(steps, slots): summed over the load, the steps a request runs, and the tokens it holds in each of them.

    In its first step it holds its prompt, in each later one a token more: over o steps o·p + o(o-1)/2.
    """
    steps = slots = 0
    for item in items:
        steps += item.output_len
        slots += item.output_len * item.prompt_len + item.output_len * (item.output_len - 1) // 2
    return steps, slots


def mean_length_over_time(items: Sequence[Item]) -> float:
    """Tokens that a running request holds, averaged over requests and their steps: long ones count for longer."""
    steps, slots = lifetime_lengths(items)
    return slots / steps


def requests_that_fit(slots: int, mean_length: float, waste: float) -> float:
    """How many requests run at once in so many slots, where each needs mean_length and wastes `waste` more."""
    return slots / (mean_length + waste)


def hit_rate(requests: int, prefixes: int, prefix_len: int, unique_len: int, block_size: int) -> float:
    """Share of prompt tokens found: whole blocks of a prefix, by all requests but the first of each prefix."""
    found = min(prefix_len, prefix_len + unique_len - 1) // block_size * block_size
    return (requests - prefixes) / requests * found / (prefix_len + unique_len)
