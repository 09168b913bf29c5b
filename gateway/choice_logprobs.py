"""The `logprobs` and `prompt_logprobs` of a job's choices, written as its endpoint has them, from its deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from client import TokenLogprobs
from gateway.generation import Delta, Order
from gateway.logprobs import TokenNames, prompt_logprobs


class Writer(Protocol):
    """Writes the tokens of one choice, part by part."""

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]: ...


class ChoiceLogprobs:
    """Of all choices of one order. make: a writer for each choice; None: nobody asked for `logprobs`. num_prompt: the
    likeliest tokens told of in `prompt_logprobs`; None: nobody asked for them."""

    def __init__(
        self, order: Order, names: TokenNames | None, make: Callable[[], Writer] | None, num_prompt: int | None
    ):
        self._order = order
        self._names = names
        self._make = make
        self._num_prompt = num_prompt
        self._writers: dict[int, Writer] = {}
        self._of_prompts: dict[int, list[dict[str, Any] | None]] = {}

    def part(self, delta: Delta) -> dict[str, Any] | None:
        """`logprobs` of a delta; the prompt's before those of the first one, if the prompt is echoed."""
        if delta.prompt_logprobs is not None and self._num_prompt is not None and self._names is not None:
            written = prompt_logprobs(self._names, delta.prompt_logprobs, self._num_prompt)
            self._of_prompts.setdefault(delta.index // self._order.n, written)
        if self._make is None:
            return None
        token_ids, told = list(delta.token_ids), list(delta.logprobs or ())
        writer = self._writers.get(delta.index)
        if writer is None:
            writer = self._writers[delta.index] = self._make()
            if self._order.echoes:
                token_ids = [*self._order.prompts[delta.index // self._order.n], *token_ids]
                told = [*(delta.prompt_logprobs or ()), *told]
        return writer.part(token_ids, told)

    def of_prompt(self, index: int) -> dict[str, Any]:
        """The field `prompt_logprobs` of a choice, if asked for; when the job is done."""
        if self._num_prompt is None:
            return {}
        return {"prompt_logprobs": self._of_prompts[index // self._order.n]}
