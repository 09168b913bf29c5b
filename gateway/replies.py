"""What the answers look like, for the OpenAPI document. The answers themselves are written without these models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    role: str
    content: str


class Candidate(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Candidate):
    top_logprobs: list[Candidate]


class ChatLogprobs(BaseModel):
    content: list[ChatToken]


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptCandidate(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class _Choice(BaseModel):
    index: int
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChoice(_Choice):
    logprobs: ChatLogprobs | None
    message: AssistantMessage


class TextChoice(_Choice):
    logprobs: TextLogprobs | None
    prompt_logprobs: list[dict[str, PromptCandidate] | None] | None = None
    text: str


class _Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Answer):
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, PromptCandidate] | None] | None = None


class TextCompletion(_Answer):
    choices: list[TextChoice]


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: str
    data: list[Model]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class ReplicaHealth(BaseModel):
    replica: int
    state: str
    epoch: int
    running: int
    free_blocks: int
    total_blocks: int


class Health(BaseModel):
    status: str
    replicas: list[ReplicaHealth]
    waiting: int


class Version(BaseModel):
    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "something in the request is wrong; `param` names it"},
    401: {"model": ErrorReply, "description": "no valid API key"},
    404: {"model": ErrorReply, "description": "no such model"},
    408: {"model": ErrorReply, "description": "not complete within the request's own timeout"},
    413: {"model": ErrorReply, "description": "the body is too large"},
    415: {"model": ErrorReply, "description": "the body was not sent as JSON"},
    429: {"model": ErrorReply, "description": "the queue is full; see Retry-After"},
    503: {"model": ErrorReply, "description": "nobody can serve it now; see Retry-After"},
}
