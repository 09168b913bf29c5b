"""One line of a batch file → a prompt and sampling parameters, and the line that answers it. Pure: no files, no server.

Fields are OpenAI's, and those of ours that it lacks; a field that is null counts as absent, an unknown one is an error.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from client.aio import Prompt
from client.chunk import Completion
from protocol.messages import SamplingParams

DEFAULT_MAX_TOKENS = 256


class LineError(ValueError):
    """The line asks for nothing that can be answered; `param` names the field at fault, if one is."""

    def __init__(self, message: str, param: str = ""):
        super().__init__(message)
        self.param = param


class Line(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a line may say."""

    custom_id: str | int | None = None
    """Given back with the answer."""
    model: str | None = None
    """If given, it must be the one that is served."""
    prompt: str | list[int] | None = None
    """Plain text, or token ids."""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    n: int = 1
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""

    @property
    def content(self) -> Prompt:
        """The prompt, in whichever form it was given."""
        return self.messages if self.messages is not None else self.prompt or []

    @property
    def sampling(self) -> SamplingParams:
        longest = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        return SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if longest is None else longest,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} or None,
        )


def read_object(text: str) -> dict[str, Any]:
    """A line of JSON, null fields left out. Raises LineError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise LineError("no JSON object")
    return {name: value for name, value in content.items() if value is not None}


def read_line(content: dict[str, Any], model_name: str) -> Line:
    """A checked line. Raises LineError naming the field."""
    unknown = sorted(set(content) - set(Line.__struct_fields__))
    if unknown:
        hint = "; use stop_token_ids" if unknown[0] == "stop" else ""
        raise LineError(f"unknown field {unknown[0]!r}{hint}", unknown[0])
    try:
        line = msgspec.convert(content, Line)
    except msgspec.ValidationError as error:
        raise LineError(str(error), _field_of(str(error))) from None
    if (line.prompt is None) == (line.messages is None):
        raise LineError("give either prompt or messages", "prompt")
    if not all(token.isdecimal() for token in line.logit_bias):
        raise LineError("logit_bias maps token ids to numbers", "logit_bias")
    if line.content in ("", []):
        name = "prompt" if line.messages is None else "messages"
        raise LineError(f"{name} is empty", name)
    if line.max_tokens is not None and line.max_completion_tokens is not None:
        raise LineError("give either max_tokens or max_completion_tokens", "max_tokens")
    if line.n != 1:
        raise LineError("only one answer per line is given", "n")
    if line.model is not None and line.model != model_name:
        raise LineError(f"model {line.model!r} is not served here, but {model_name!r} is", "model")
    return line


def _field_of(message: str) -> str:
    """msgspec ends its messages with the place: "Expected `int`, got `str` - at `$.max_tokens`"."""
    _, _, place = message.rpartition("`$.")
    return place.rstrip("`").split("[")[0] if place != message else ""


def answer(custom_id: object, completion: Completion) -> dict[str, Any]:
    """The output line of an answered request."""
    usage = completion.usage
    return _with_id(
        custom_id,
        {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
        },
    )


def failure(custom_id: object, number: int, code: str, message: str, param: str = "") -> dict[str, Any]:
    """The output line of a request that could not be answered; `number`: its line in the input, from 1."""
    error = {"code": code, "message": message, "param": param or None, "line": number}
    return _with_id(custom_id, {"error": error})


def _with_id(custom_id: object, content: dict[str, Any]) -> dict[str, Any]:
    return content if custom_id is None else {"custom_id": custom_id, **content}
