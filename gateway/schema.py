"""What may stand in a request, as OpenAI and vLLM name it; types and ranges only. What the model adds to that (its
vocabulary, its length) the scheduler checks."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.refused import Unsupported

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_IDS = 64
"""As many as the scheduler takes."""
MAX_LOGIT_BIAS = 1024
"""As many as the scheduler takes."""
MAX_LOGPROBS = 20
"""As many as the scheduler takes."""
MAX_MESSAGES = 4096
"""And as many parts of one message."""
MAX_CHOICES = 1024
"""Prompts × n of one request."""

_ID = re.compile(r"\d{1,9}")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""The first that is wrong is told; to collect them all would take seconds."""
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """Strict: no value is converted to another type, and an unknown parameter is an error, not a wish ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk without choices brings the usage")
    continuous_usage_stats: bool | None = Field(None, description="every chunk brings the usage so far")
    include_obfuscation: bool | None = Field(None, description="no effect")


class JsonSchema(Body):
    """OpenAI's wrapping of a schema."""

    name: str | None = Field(None, description="no effect")
    description: str | None = Field(None, description="no effect")
    schema_: dict[str, Any] | bool = Field(alias="schema", description="the JSON schema")
    strict: bool | None = Field(None, description="no effect: an output always follows the schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="with type json_schema")

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema")
        return self


class StructuredOutputs(Body):
    """vLLM's; exactly one of them."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json", description="a JSON schema, also as text")
    regex: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None


class Generation(Body, Unsupported):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="the served model; nothing: whatever is served")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, description="0 is greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_N, description="choices for each prompt")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="choice i of a prompt draws with seed + i")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = Field(None, description="go on after the model's own end token")
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="nothing stops the output before")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="of tokens that the output has")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="each time that the output has a token")
    repetition_penalty: float | None = Field(None, gt=0, le=2, description="of tokens of prompt and output; 1: off")
    logit_bias: dict[str, float] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="token id → added to its logit, in [-100, 100]"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of each prompt token and so many likeliest ones; not in a stream"
    )
    return_tokens_as_token_ids: bool | None = Field(None, description='logprobs name tokens like "token_id:5"')
    response_format: ResponseFormat | None = Field(None, description="the shape that the output must have")
    structured_outputs: StructuredOutputs | None = Field(None, description="the same, as vLLM names it")
    guided_json: dict[str, Any] | bool | str | None = Field(None, description="vLLM's older structured_outputs.json")
    guided_regex: str | None = Field(None, description="vLLM's older structured_outputs.regex")
    guided_choice: Texts | None = Field(None, description="vLLM's older structured_outputs.choice")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower runs first")
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="shares prefixes only under it")
    timeout: float | None = Field(None, gt=0, le=86400, description="seconds until the last token, or it is an error")
    return_token_ids: bool | None = None
    # accepted, without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell of with each one; None: log-probabilities are not asked for."""
        raise NotImplementedError

    @field_validator("logit_bias")
    @classmethod
    def _ids_and_sizes(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not _ID.fullmatch(token):
                raise ValueError(f"{token[:20]!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} must be in [-100, 100]")
        return value

    @property
    def biases(self) -> dict[int, float] | None:
        return {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(BaseModel):
    """A piece of a message's content. Other kinds than text are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; beside these fields it may have whatever the model's chat template knows."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is text, its parts joined by line breaks (as vLLM does)."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content, **(self.model_extra or {})}


class Conversation(Body):
    """What a chat template is rendered from."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: list[dict[str, Any]] | None = Field(None, max_length=128, description="for the chat template, nothing else")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _names_are_free(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = {"messages", "tools", "add_generation_prompt"} & set(value or ())
        if taken:
            raise ValueError(f"{min(taken)} is a parameter of its own")
        return value

    @property
    def template_variables(self) -> dict[str, Any]:
        add = True if self.add_generation_prompt is None else self.add_generation_prompt
        return {**(self.chat_template_kwargs or {}), "tools": self.tools, "add_generation_prompt": add}


class ChatCompletionRequest(Conversation, Generation):
    """POST /v1/chat/completions"""

    logprobs: bool | None = Field(None, description="tell the log-probability of each token")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="and of so many likeliest ones")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="goes before max_tokens")
    parallel_tool_calls: bool | None = Field(None, description="no effect")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="text, several texts, token ids, or several lists of token ids")
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="0: nothing but an echo of the prompt; default 16")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="tell log-probabilities, also of so many likeliest tokens"
    )
    echo: bool | None = Field(None, description="the prompt comes before the output")
    add_special_tokens: bool | None = Field(None, description="default: true, at most one BOS")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, all of a kind."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        several: Any = [prompt] if isinstance(prompt[0], int) else prompt
        return several


class TokenizeText(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="default: true, at most one BOS")
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
