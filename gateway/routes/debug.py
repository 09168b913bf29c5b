"""POST /v1/debug/prefix: why a prompt does or does not hit the prefix cache."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, Discriminator, Tag

from client import ClientError
from gateway import answers
from gateway.errors import from_client
from gateway.replies import ERRORS
from gateway.schema import ChatCompletionRequest, CompletionRequest
from gateway.state import Gateway, Shared
from protocol.messages import GroupPrefix, PrefixExplanation, ReplicaPrefix

router = APIRouter(tags=["operation"])

REASONS = {
    "evicted": "it was cached, and evicted to make room for other content",
    "lost": "it was cached, and lost with its worker",
    "withdrawn": "it was cached, and withdrawn because the model gave no valid logits there",
    "computing": "a running request is computing it; it can be hit once that is done",
    "never_stored": "nothing that begins like this was ever stored",
    "unknown": "nothing that begins like this was stored, or it was evicted too long ago to remember",
    "disabled": "prefix caching is off",
}


class MissingBlock(BaseModel):
    block: int
    first_token: int
    last_token: int
    reason: str
    text: str


class Group(BaseModel):
    group: int
    sliding_window: int | None
    hit_blocks: int
    hit_tokens: int
    cached_blocks: int
    missing: MissingBlock | None


class Replica(BaseModel):
    replica: int
    state: str
    epoch: int
    hit_blocks: int
    hit_tokens: int
    explanation: str
    groups: list[Group]


class Prompt(BaseModel):
    num_tokens: int
    usable_tokens: int
    replicas: list[Replica]


class Prefixes(BaseModel):
    object: str
    block_size: int
    prompts: list[Prompt]


def _kind(body: Any) -> str:
    given = body if isinstance(body, dict) else getattr(body, "__dict__", {})
    return "chat" if "messages" in given else "completion"


Question = Annotated[
    Annotated[ChatCompletionRequest, Tag("chat")] | Annotated[CompletionRequest, Tag("completion")],
    Discriminator(_kind),
]
_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 404, 413, 415, 503)}


@router.post("/v1/debug/prefix", response_model=Prefixes, responses=_ERRORS)
async def explain_prefix(body: Annotated[Question, Body()], gateway: Shared) -> dict[str, Any]:
    """How much of a prompt is in the prefix cache, per replica and cache group, and what ends the hit.

    Takes the body of a completion or a chat completion as it is; nothing is generated and no cache entry is touched.
    """
    answers.check(gateway, body)
    param, prompts = await _prompts(gateway, body)
    found = []
    try:
        client = await gateway.upstream.client()
        for prompt in prompts:
            found.append(await client.explain_prefix(prompt, cache_salt=body.cache_salt or ""))
    except ClientError as error:
        raise from_client(error, param) from None
    return {
        "object": "prefix_explanation",
        "block_size": found[0].block_size,
        "prompts": [
            await _prompt(gateway, prompt, answer, param) for prompt, answer in zip(prompts, found, strict=True)
        ],
    }


async def _prompts(gateway: Gateway, body: ChatCompletionRequest | CompletionRequest) -> tuple[str, list[list[int]]]:
    if isinstance(body, ChatCompletionRequest):
        messages = [message.for_template for message in body.messages]
        return "messages", [await gateway.texts.encode_chat(messages, "messages", **body.template_variables)]
    special = body.add_special_tokens is not False
    return "prompt", [
        await gateway.texts.encode(prompt, "prompt", add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]


async def _prompt(gateway: Gateway, prompt: list[int], found: PrefixExplanation, param: str) -> dict[str, Any]:
    async def group(told: GroupPrefix) -> dict[str, Any]:
        missing = None
        if told.missing_block >= 0:
            first, last = told.missing_first_token, told.missing_last_token
            missing = {
                "block": told.missing_block,
                "first_token": first,
                "last_token": last,
                "reason": told.reason,
                "text": await gateway.texts.decode(prompt[first : last + 1], param),
            }
        return {
            "group": told.group,
            "sliding_window": told.sliding_window or None,
            "hit_blocks": told.hit_blocks,
            "hit_tokens": told.hit_tokens,
            "cached_blocks": told.cached_blocks,
            "missing": missing,
        }

    return {
        "num_tokens": found.num_tokens,
        "usable_tokens": found.most_blocks * found.block_size,
        "replicas": [
            {
                "replica": told.replica,
                "state": told.state,
                "epoch": told.epoch,
                "hit_blocks": told.hit_blocks,
                "hit_tokens": told.hit_tokens,
                "explanation": explain(found, told),
                "groups": [await group(each) for each in told.groups],
            }
            for told in found.replicas
        ],
    }


def explain(found: PrefixExplanation, told: ReplicaPrefix) -> str:
    """One replica's case in a sentence."""
    if told.state != "ready":
        return "no worker serves this replica"
    if found.most_blocks == 0:
        return f"the prompt is too short: a hit needs more than {found.block_size} tokens"
    if told.hit_blocks == found.most_blocks:
        return f"all that can hit does: {told.hit_tokens} of {found.num_tokens} tokens; the last one is always computed"
    ends = [group for group in told.groups if group.missing_block >= 0]
    if not ends:
        return "each cache group has a hit, but there is no greater length at which all have one"
    end = min(ends, key=lambda group: group.hit_blocks)
    where = f"block {end.missing_block} (tokens {end.missing_first_token} to {end.missing_last_token})"
    which = f" of cache group {end.group}" if len(told.groups) > 1 else ""
    return f"{told.hit_tokens} of {found.num_tokens} tokens hit; {where}{which} does not: {REASONS[end.reason]}"
