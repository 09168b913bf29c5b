"""Log-probabilities as OpenAI and vLLM write them, of one choice, as its tokens come. Knows no HTTP.

A token's text is that of its bytes alone; where a character spans tokens that is U+FFFD, and `bytes` tell the truth.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from client import TokenLogprobs
from client.token_bytes import TokenBytes

LOWEST = -9999.0
"""JSON knows no infinity (vLLM's number)."""


class TokenNames:
    """How tokens are written. special: those that the text leaves out; by_id: as "token_id:5" instead of their text."""

    def __init__(self, vocabulary: TokenBytes, special: frozenset[int], by_id: bool = False):
        self._vocabulary = vocabulary
        self._special = special
        self._by_id = by_id

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self.decoded(token_id)

    def decoded(self, token_id: int) -> str:
        return self._vocabulary[token_id].decode("utf-8", "replace")

    def raw(self, token_id: int) -> bytes:
        return self._vocabulary[token_id]

    def shown(self, token_id: int) -> bytes:
        """Its bytes in the text of the answer."""
        return b"" if token_id in self._special else self._vocabulary[token_id]


class ChatLogprobs:
    """`logprobs` of a chat choice: {"content": one entry a token}."""

    def __init__(self, names: TokenNames, num_top: int):
        self._names = names
        self._num_top = num_top

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens."""
        return {"content": [self._token(*pair) for pair in zip(token_ids, logprobs, strict=True)]}

    def _token(self, token_id: int, told: TokenLogprobs | None) -> dict[str, Any]:
        top = told.top[: self._num_top] if told is not None else ()
        return {
            **self._entry(token_id, LOWEST if told is None else told.logprob),
            "top_logprobs": [self._entry(*candidate) for candidate in top],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self._names.raw(token_id)),
        }


class CompletionLogprobs:
    """`logprobs` of a completion's choice: four lists, an element a token. Offsets count characters of the text."""

    def __init__(self, names: TokenNames, num_top: int):
        self._names = names
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens, those of an echoed prompt before all others."""
        offsets = []
        for token_id in token_ids:
            shown = self._names.shown(token_id)
            if shown and not 0x80 <= shown[0] <= 0xBF:  # it begins a character: one left incomplete shows as U+FFFD
                self._offset += len(self._decoder.decode(b"", final=True))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(shown))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if told is None else max(told.logprob, LOWEST) for told in logprobs],
            "tokens": [self._names.text(token_id) for token_id in token_ids],
            "top_logprobs": [self._top(told) for told in logprobs],
        }

    def _top(self, told: TokenLogprobs | None) -> dict[str, float] | None:
        """By text, the token itself first; of two candidates with the same text the likelier."""
        if told is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in ((told.token_id, told.logprob), *told.top[: self._num_top]):
            found.setdefault(self._names.text(token_id), max(logprob, LOWEST))
        return found


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The parts of one choice as one."""
    return {name: [element for part in parts for element in part[name]] for name in parts[0]} if parts else {}


def prompt_logprobs(
    names: TokenNames, logprobs: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's field: per prompt token its candidates by id, null for the first token."""

    def candidate(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": names.decoded(token_id)}

    result: list[dict[str, Any] | None] = []
    for told in logprobs:
        if told is None:
            result.append(None)
            continue
        entry = {str(told.token_id): candidate(told.token_id, told.logprob, told.rank)}
        for rank, (token_id, logprob) in enumerate(told.top[:num_top], 1):
            entry.setdefault(str(token_id), candidate(token_id, logprob, rank))
        result.append(entry)
    return result
