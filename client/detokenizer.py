"""Token ids → text, as they come, never half a character. Knows one request's output; nothing of its prompt.

Deltas join to exactly `decode(all ids, skip_special_tokens=True)`. Two things make that more than a call per token:

- A character may span tokens. A decoder shows an incomplete one as U+FFFD, so text behind which more bytes may
  still belong (trailing U+FFFD) is held back until the next token settles it, or `flush` says that none comes.
- Some decoders treat the first token of a text differently (SentencePiece drops its leading space). So a delta is
  always the difference of two decodings that start at the same token, a little before the new one
  (as in text-generation-inference and vLLM's `detokenize_incrementally`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

REPLACEMENT = "�"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class DecoderTraits(NamedTuple):
    """What all detokenizers of one tokenizer share; costly to find out (it writes the whole vocabulary)."""

    byte_fallback: bool
    special_ids: frozenset[int]

    @staticmethod
    def of(tokenizer: Tokenizer) -> DecoderTraits:
        special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        return DecoderTraits(has_byte_fallback(tokenizer), special)


class IncrementalDetokenizer:
    """The text of one growing list of token ids."""

    def __init__(self, tokenizer: Tokenizer, traits: DecoderTraits | None = None):
        self._tokenizer = tokenizer
        self._byte_fallback, self._special = traits or DecoderTraits.of(tokenizer)
        self._window: list[int] = []
        """Ids from the start of the context on: the context (settled, shown) and what came after it."""
        self._context = 0
        """How many ids of the window are context."""
        self._shown = ""
        """The part of the window's text that was given out already."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Append ids; return the text that has become certain ("" while a character is incomplete)."""
        token_ids = [token for token in token_ids if token not in self._special]  # they have no text
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        if self._byte_fallback and self._is_byte(self._window[-1]):
            return ""  # a run of byte tokens is decoded as a whole, and only once it has ended
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        delta = self._show(certain)
        if certain == text:
            self._advance()
        return delta

    def flush(self) -> str:
        """No more ids come: return what was held, U+FFFD for a character that stays incomplete included."""
        return self._show(self._decode(self._window))

    def _show(self, certain: str) -> str:
        if len(certain) <= len(self._shown):
            return ""
        delta = certain[len(self._shown) :]
        self._shown = certain
        return delta

    def _advance(self) -> None:
        """Everything is settled: what came after the context becomes the next context, unless it has no text."""
        recent = self._window[self._context :]
        text = self._decode(recent)
        if text:
            self._window = recent
            self._context = len(recent)
            self._shown = text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether the decoder joins tokens like <0xE4> into characters."""
    return '"ByteFallback"' in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
