"""What a submitted request must look like. Bad input is refused here, by name, before anything is kept of it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from protocol.messages import RejectCode, SamplingParams, StructuredOutputsParams

MAX_REQUEST_ID_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 65536


class InvalidRequest(ValueError):
    """The request cannot be served; `code` and `param` go to the client with the message."""

    def __init__(self, code: RejectCode, message: str, param: str = ""):
        super().__init__(message)
        self.code = code
        self.param = param


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest when the id is empty or too long."""
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            "invalid_request", f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", "request_id"
        )


def check_prompt(tokens: NDArray[np.int32], vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest when the prompt is empty, holds ids the model lacks, or leaves no room for one token."""
    if not len(tokens):
        raise InvalidRequest("invalid_request", "the prompt is empty", "token_ids")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequest(
            "invalid_request",
            f"token id {bad} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})",
            "token_ids",
        )
    if len(tokens) >= max_model_len:
        raise InvalidRequest(
            "too_long",
            f"the prompt has {len(tokens)} tokens; with at least one to generate, at most {max_model_len - 1} fit "
            f"in the model's length of {max_model_len}",
            "token_ids",
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest naming the first parameter that is out of range."""
    bias = params.logit_bias or {}
    rules = (
        ("max_tokens", params.max_tokens >= 1, "must be at least 1"),
        (
            "temperature",
            math.isfinite(params.temperature) and params.temperature >= 0,
            "must be finite and not negative",
        ),
        ("top_k", params.top_k >= -1, "must be -1 or 0 (off) or positive"),
        ("top_p", 0 < params.top_p <= 1, "must be in (0, 1]"),
        ("min_p", 0 <= params.min_p <= 1, "must be in [0, 1]"),
        ("seed", params.seed is None or 0 <= params.seed < 2**64, "must fit in 64 bits, unsigned"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, "must be between 0 and max_tokens"),
        ("stop_token_ids", len(params.stop_token_ids) <= MAX_STOP_IDS, f"may name at most {MAX_STOP_IDS} ids"),
        (
            "stop_token_ids",
            all(0 <= token < vocab_size for token in params.stop_token_ids),
            f"must be ids of the vocabulary (0 to {vocab_size - 1})",
        ),
        ("presence_penalty", -2 <= params.presence_penalty <= 2, "must be in [-2, 2]"),
        ("frequency_penalty", -2 <= params.frequency_penalty <= 2, "must be in [-2, 2]"),
        ("repetition_penalty", 0 < params.repetition_penalty <= 2, "must be in (0, 2]"),
        ("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"may name at most {MAX_LOGIT_BIAS} ids"),
        (
            "logit_bias",
            all(0 <= token < vocab_size for token in bias),
            f"must name ids of the vocabulary (0 to {vocab_size - 1})",
        ),
        ("logprobs", params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS, f"must be 0 to {MAX_LOGPROBS}"),
        (
            "prompt_logprobs",
            params.prompt_logprobs is None or 0 <= params.prompt_logprobs <= MAX_LOGPROBS,
            f"must be 0 to {MAX_LOGPROBS}",
        ),
        ("logit_bias", all(-100 <= value <= 100 for value in bias.values()), "must have values in [-100, 100]"),
    )
    if params.structured_outputs is not None:
        _check_structured_outputs(params.structured_outputs)
    for name, holds, rule in rules:
        if not holds:
            raise InvalidRequest("invalid_request", f"{name} {rule}, got {getattr(params, name)}", name)


def _check_structured_outputs(shape: StructuredOutputsParams) -> None:
    """Only what every step would suffer from; whether it is a grammar at all, worker and gateway find out."""
    set_fields = [shape.json is not None, shape.regex is not None, bool(shape.choice), shape.json_object]
    if sum(set_fields) != 1:
        raise InvalidRequest(
            "invalid_request", "one of json, regex, choice and json_object must be set", "structured_outputs"
        )
    if len(shape.json or "") + len(shape.regex or "") + sum(map(len, shape.choice)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            "invalid_request", f"a grammar may have at most {MAX_GRAMMAR_CHARS} characters", "structured_outputs"
        )
