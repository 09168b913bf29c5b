"""Server-sent events of an OpenAI completions stream: lines in, token counts out. Pure: no sockets, no clock.

Source of the line format: WHATWG HTML, section 9.2 (server-sent events); of the payload: OpenAI's completions API.
"""

from __future__ import annotations

import json
from typing import Any

from bench.target import TargetError


class CompletionStream:
    """Counts the tokens of one streamed completion.

    Servers differ in what they say about a chunk. The count is taken from the first of these that is there:
    running usage (`stream_options.continuous_usage_stats`: vLLM), the chunk's `token_ids` (`return_token_ids`),
    else one token for each chunk that has text. A usage chunk at the end adds what the last rule missed (tokens
    whose text was held back).
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # counted so far
        self.token_ids: list[int] = []  # of those chunks that name them
        self.text = ""
        self.done = False  # [DONE] was seen
        self.finish_reason: str | None = None

    def feed(self, line: str) -> int:
        """Take one line; return how many new output tokens it brings (0 for comments, blanks and closing lines).

        Raises TargetError on an error event or a payload that isn't the protocol's.
        """
        field, _, value = line.partition(":")
        if field != "data":
            return 0
        value = value.strip()
        if value == "[DONE]":
            self.done = True
            return 0
        try:
            event: dict[str, Any] = json.loads(value)
        except ValueError as error:
            raise TargetError(f"a chunk is no JSON: {value[:200]!r}") from error
        if "error" in event:
            raise TargetError(f"server reports: {json.dumps(event['error'])[:300]}")
        new = self._new_tokens(event)
        self.num_tokens += new
        return new

    def _new_tokens(self, event: dict[str, Any]) -> int:
        choices = event.get("choices") or []
        usage = event.get("usage")
        if choices and choices[0].get("finish_reason"):
            self.finish_reason = choices[0]["finish_reason"]
        token_ids = choices[0].get("token_ids") if choices else None
        text = choices[0].get("text") if choices else None
        self.token_ids += token_ids or ()
        self.text += text or ""
        if usage is not None:
            return max(0, int(usage["completion_tokens"]) - self.num_tokens)
        if not choices:
            return 0
        if token_ids is not None:
            return len(token_ids)
        return 1 if text else 0
