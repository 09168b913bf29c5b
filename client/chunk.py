"""What a stream yields, and all of it put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.logprobs import TokenLogprobs
from protocol.messages import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Chunk:
    """One or more new tokens of a request. A slow reader gets larger chunks, never fewer tokens.

    The last chunk has a finish_reason and the usage; it may carry no token.
    """

    request_id: str
    text: str
    """New text. May lag behind token_ids while a character is incomplete; the last chunk brings all that was held."""
    token_ids: tuple[int, ...]
    indices: tuple[int, ...]
    """Position of each new token in the output, from 0, without gaps."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """If asked for, one with each new token; None where the server does not know it any more (after a reconnect)."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """If asked for, in the chunk with the first token: one with each token of the prompt, None with the first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @staticmethod
    def join(chunks: Iterable[Chunk]) -> Completion:
        """The chunks of one stream, all of them, as one answer."""
        chunks = list(chunks)
        last = chunks[-1]
        assert last.finish_reason is not None and last.usage is not None, "the stream has not ended"
        return Completion(
            request_id=last.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=last.finish_reason,
            usage=last.usage,
            logprobs=None
            if last.logprobs is None
            else tuple(told for chunk in chunks for told in chunk.logprobs or ()),
            prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs), None),
        )
