"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway import answers
from gateway.body import JsonRoute
from gateway.choice_logprobs import ChoiceLogprobs, Writer
from gateway.errors import ApiError
from gateway.logprobs import CompletionLogprobs, TokenNames
from gateway.replies import ERRORS, TextCompletion
from gateway.schema import CompletionRequest
from gateway.state import Shared

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


class _Completion:
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, echoes: Sequence[str], n: int):
        self._echoes = echoes
        """By prompt: what comes before its outputs; none of them when nothing is echoed."""
        self._n = n

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def logprobs(self, names: TokenNames, num_top: int) -> Writer:
        return CompletionLogprobs(names, num_top)

    def whole(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echo(index) + text}

    def piece(self, index: int, text: str, first: bool) -> bytes:
        return b'"text":' + answers.encode(self._echo(index) + text if first else text)

    def within(self, told: ChoiceLogprobs, index: int) -> dict[str, Any]:
        return told.of_prompt(index)

    def beside(self, told: ChoiceLogprobs) -> dict[str, Any]:
        return {}


@router.post("/v1/completions", responses={200: {"model": TextCompletion}, **ERRORS})
async def create_completion(body: CompletionRequest, request: Request, gateway: Shared) -> Response:
    """What follows a text or token ids, of one prompt or several; a stream of chunks with `stream`."""
    answers.check(gateway, body)
    shape = await answers.checked_shape(gateway, body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    add_special_tokens = body.add_special_tokens is not False
    prompts, echoes = [], []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(await gateway.texts.encode(prompt, "prompt", add_special_tokens=add_special_tokens))
        else:
            prompts.append(prompt)
        gateway.check_length(prompts[-1], "prompt")
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else await gateway.texts.decode(prompt, "prompt"))
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    order = answers.order_of(
        body, prompts, request, prompt_param="prompt", max_tokens=most, shape=shape, echo=bool(body.echo)
    )
    return await answers.answer(gateway, body, order, request, _Completion(echoes, order.n))
