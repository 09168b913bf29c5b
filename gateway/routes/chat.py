"""POST /v1/chat/completions"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from gateway import answers
from gateway.body import JsonRoute
from gateway.choice_logprobs import ChoiceLogprobs, Writer
from gateway.errors import ApiError
from gateway.logprobs import ChatLogprobs, TokenNames
from gateway.replies import ERRORS, ChatCompletion
from gateway.schema import ChatCompletionRequest
from gateway.state import Shared

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


class _Chat:
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, names: TokenNames, num_top: int) -> Writer:
        return ChatLogprobs(names, num_top)

    def whole(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, index: int, text: str, first: bool) -> bytes:
        role = b'"role":"assistant",' if first else b""
        return b'"delta":{%b"content":%b}' % (role, answers.encode(text))

    def within(self, told: ChoiceLogprobs, index: int) -> dict[str, Any]:
        return {}

    def beside(self, told: ChoiceLogprobs) -> dict[str, Any]:
        return told.of_prompt(0)


_SHAPE = _Chat()


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}, **ERRORS})
async def create_chat_completion(body: ChatCompletionRequest, request: Request, gateway: Shared) -> Response:
    """The model's next message in a conversation; a stream of chunks with `stream`."""
    answers.check(gateway, body)
    shape = await answers.checked_shape(gateway, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    messages = [message.for_template for message in body.messages]
    prompt = await gateway.texts.encode_chat(messages, "messages", **body.template_variables)
    gateway.check_length(prompt, "messages")
    room = max(1, gateway.max_model_len - len(prompt))
    most = body.max_completion_tokens or body.max_tokens or room
    order = answers.order_of(body, [prompt], request, prompt_param="messages", max_tokens=most, shape=shape)
    return await answers.answer(gateway, body, order, request, _SHAPE)
