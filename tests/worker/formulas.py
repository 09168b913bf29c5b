"""What the sampler's parts compute, written as plainly as can be, in float64."""

from __future__ import annotations

from collections import Counter

import numpy as np

from protocol.messages import SamplingParams


def expected(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The logits [V] from which the token after `output` is drawn: biases, stop tokens, penalties, token by token."""
    result = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        result[token] += bias
    if len(output) < params.min_tokens:
        result[list(params.stop_token_ids)] = -np.inf
    counts = Counter(output)
    for token in range(len(result)):
        if token in counts or token in prompt:
            factor = params.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        if token in counts:
            result[token] -= params.frequency_penalty * counts[token] + params.presence_penalty
    return result
