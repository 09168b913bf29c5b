"""POST /tokenize, /detokenize (as vLLM has them)"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.body import JsonRoute
from gateway.errors import ApiError
from gateway.replies import ERRORS, Detokenized, Tokenized
from gateway.schema import DetokenizeRequest, TokenizeChat, TokenizeText
from gateway.state import Shared

router = APIRouter(tags=["tokens"], route_class=JsonRoute)
_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 404, 413, 415)}


@router.post("/tokenize", response_model=Tokenized, response_model_exclude_none=True, responses=_ERRORS)
async def tokenize(body: TokenizeText | TokenizeChat, gateway: Shared) -> dict[str, Any]:
    """The ids of a text, or of a conversation as the chat template writes it."""
    gateway.check_model(body.model)
    if isinstance(body, TokenizeText):
        param, special = "prompt", body.add_special_tokens is not False
        ids = await gateway.texts.encode(body.prompt, param, add_special_tokens=special)
    else:
        param, messages = "messages", [message.for_template for message in body.messages]
        ids = await gateway.texts.encode_chat(messages, param, **body.template_variables)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": gateway.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = await gateway.texts.token_strings(ids, param)
    return found


@router.post("/detokenize", response_model=Detokenized, responses=_ERRORS)
async def detokenize(body: DetokenizeRequest, gateway: Shared) -> dict[str, str]:
    """The text of ids, special tokens left out."""
    gateway.check_model(body.model)
    size = gateway.model.vocab_size
    if body.tokens and max(body.tokens) >= size:
        raise ApiError(400, f"token id {max(body.tokens)} is outside the vocabulary of {size}", param="tokens")
    return {"prompt": await gateway.texts.decode(body.tokens, "tokens")}
