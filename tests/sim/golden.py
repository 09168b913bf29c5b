"""What every stream must be: the simulated model, a hash of all tokens so far, run on one request alone.

Knows nothing of blocks, batches or the scheduler.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.messages import FinishReason, SamplingParams

_MASK = (1 << 64) - 1
NAN = -1


def extend(state: int, token: int) -> int:
    """Hash of a sequence with one more token, from the hash without it (0 for the empty one)."""
    return ((state ^ (state >> 29)) * 0x9E3779B97F4A7C15 + token + 1) & _MASK


def extend_all(state: int, tokens: list[int]) -> int:
    for token in tokens:
        state = extend(state, token)
    return state


def sample(state: int, position: int, temperature: float, seed: int, vocab_size: int, nan_per_1000: int) -> int:
    """The token behind a sequence with hash `state`; with a temperature it depends on (seed, position) as well.

    `position`: the index the token will have. NAN in `nan_per_1000` of 1,000 cases: the row fails.
    """
    draw = state if temperature == 0 else (state ^ (seed * 0xD1342543DE82EF95 + position * 0x2545F4914F6CDD1D)) & _MASK
    draw = ((draw ^ (draw >> 32)) * 0xBF58476D1CE4E5B9) & _MASK
    draw ^= draw >> 31
    if draw % 1000 < nan_per_1000:
        return NAN
    return (draw >> 10) % vocab_size


class Stream(NamedTuple):
    """What a client must have seen at the end."""

    tokens: list[int]
    reason: FinishReason


def golden_stream(
    prompt: list[int],
    sampling: SamplingParams,
    *,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    vocab_size: int,
    nan_per_1000: int = 0,
) -> Stream:
    """The stream of a request that runs alone in endless memory."""
    state, length = extend_all(0, prompt), len(prompt)
    limit = min(length + sampling.max_tokens, max_model_len)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    output: list[int] = []
    while True:
        token = sample(state, length, sampling.temperature, sampling.seed or 0, vocab_size, nan_per_1000)
        if token == NAN:
            return Stream(output, "error")
        output.append(token)
        state, length = extend(state, token), length + 1
        if token in stops and len(output) >= sampling.min_tokens:
            return Stream(output, "stop")
        if length >= limit:
            return Stream(output, "length")
