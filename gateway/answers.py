"""From a request's body to a job, and from its deltas to one JSON answer or a stream of chunks.

Chat and completions differ in the names of a few fields; what differs is in a `Shape`. Chunks are put together from
bytes made once: only the text is encoded for each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response

from gateway import refused
from gateway.choice_logprobs import ChoiceLogprobs, Writer
from gateway.errors import ApiError
from gateway.generation import Delta, Job, Order
from gateway.logprobs import TokenNames, joined
from gateway.schema import MAX_CHOICES, Generation, StreamOptions
from gateway.sse import DONE, EventStream, while_connected
from gateway.state import Gateway
from gateway.structured import shape_of
from protocol.messages import SamplingParams, StructuredOutputsParams

encode = msgspec.json.encode


class Shape(Protocol):
    """How one endpoint writes a choice. `first`: nothing was written of this choice before."""

    prefix: str
    whole_object: str
    chunk_object: str

    def logprobs(self, names: TokenNames, num_top: int) -> Writer:
        """The writer of a choice's log-probabilities, with so many of the likeliest tokens."""
        ...

    def whole(self, index: int, text: str) -> dict[str, Any]:
        """The text's field of a finished choice."""
        ...

    def piece(self, index: int, text: str, first: bool) -> bytes:
        """The text's field of a chunk's choice, as JSON without braces."""
        ...

    def within(self, told: ChoiceLogprobs, index: int) -> dict[str, Any]:
        """Further fields of a finished choice."""
        ...

    def beside(self, told: ChoiceLogprobs) -> dict[str, Any]:
        """Further fields of a whole answer."""
        ...


def check(gateway: Gateway, body: Generation) -> None:
    """Raises ApiError for what can be said without looking at the prompt."""
    refused.check(body)
    gateway.check_model(body.model)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not told in a stream", param="prompt_logprobs")


async def checked_shape(gateway: Gateway, body: Generation) -> StructuredOutputsParams | None:
    """The shape the output must have, if any. Raises ApiError when it cannot be had."""
    asked = shape_of(body)
    if asked is None:
        return None
    await gateway.grammars.check(*asked)
    return asked.params


def order_of(
    body: Generation,
    prompts: Sequence[list[int]],
    request: Request,
    *,
    prompt_param: str,
    max_tokens: int,
    shape: StructuredOutputsParams | None,
    echo: bool = False,
) -> Order:
    """What the body asks for; max_tokens 0: nothing but the prompt. Raises ApiError when it is too much at once."""
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} outputs",
            param="n" if n > 1 else "prompt",
        )
    echoes = echo and body.num_logprobs is not None
    of_prompt = [count for count in (body.prompt_logprobs, body.num_logprobs if echoes else None) if count is not None]
    sampling = SamplingParams(
        max_tokens=max(1, max_tokens),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else body.seed % 2**64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.biases,
        logprobs=body.num_logprobs,
        prompt_logprobs=max(of_prompt, default=None),
        structured_outputs=shape,
    )
    return Order(
        request.state.request_id,
        prompts,
        sampling,
        prompt_param,
        n=n,
        echoes=echoes,
        prompt_only=max_tokens == 0,
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        timeout_s=body.timeout,
    )


async def answer(gateway: Gateway, body: Generation, order: Order, request: Request, shape: Shape) -> Response:
    """Generate, and answer as the body asks: at once or as a stream. A client that leaves ends it."""
    job = Job(gateway, order, wants_ids=bool(body.return_token_ids))
    told = await _choice_logprobs(gateway, body, order, shape)
    common = {
        "id": f"{shape.prefix}-{order.request_id}",
        "object": shape.chunk_object if body.stream else shape.whole_object,
        "created": int(time.time()),
        "model": gateway.config.model_name,
        "system_fingerprint": f"fp_{gateway.model.fingerprint}",
    }
    if body.stream:
        events = _Chunks(job, shape, told, common, body.stream_options)
        try:
            first = await while_connected(request.receive, events.start())
        except BaseException:
            await job.close()
            raise
        return EventStream(first, events)
    try:
        choices = await while_connected(request.receive, _gather(job, shape, told))
    finally:
        await job.close()
    more = shape.beside(told)
    content = encode({**common, "choices": choices, "usage": _usage(job, job.completion_tokens), **more})
    return Response(content, media_type="application/json")


async def _choice_logprobs(gateway: Gateway, body: Generation, order: Order, shape: Shape) -> ChoiceLogprobs:
    top = body.num_logprobs
    if top is None and body.prompt_logprobs is None:
        return ChoiceLogprobs(order, None, None, None)
    names = await gateway.texts.token_names(bool(body.return_tokens_as_token_ids))
    make = None if top is None else lambda: shape.logprobs(names, top)
    return ChoiceLogprobs(order, names, make, body.prompt_logprobs)


@dataclass
class _Whole:
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


async def _gather(job: Job, shape: Shape, told: ChoiceLogprobs) -> list[dict[str, Any]]:
    """Every choice, finished, in order."""
    await job.start()
    found: dict[int, _Whole] = {}
    choices: dict[int, dict[str, Any]] = {}
    while (delta := await job.next()) is not None:
        whole = found.setdefault(delta.index, _Whole())
        whole.pieces.append(delta.text)
        whole.token_ids += delta.token_ids
        part = told.part(delta)
        if part is not None:
            whole.logprobs.append(part)
        if delta.finish_reason is not None:
            choices[delta.index] = {
                "index": delta.index,
                **shape.whole(delta.index, "".join(whole.pieces)),
                "logprobs": joined(whole.logprobs) or None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            if job.wants_ids:
                choices[delta.index]["token_ids"] = whole.token_ids
                choices[delta.index]["prompt_token_ids"] = job.order.prompts[delta.index // job.order.n]
    for index, choice in choices.items():
        choice.update(shape.within(told, index))
    return [choices[index] for index in sorted(choices)]


def _usage(job: Job, completion: int) -> dict[str, Any]:
    prompt = job.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


class _Chunks:
    """The deltas of a job as events; then, if asked for, the usage; then [DONE]."""

    def __init__(
        self, job: Job, shape: Shape, told: ChoiceLogprobs, common: dict[str, Any], options: StreamOptions | None
    ):
        self._job = job
        self._told = told
        self._shape = shape
        self._include_usage = bool(options and options.include_usage)
        self._usage_so_far = bool(options and options.include_usage and options.continuous_usage_stats)
        self._tokens = 0
        self._head = b"data: " + encode(common)[:-1]
        self._tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"
        self._begun: set[int] = set()
        self._done = False

    async def start(self) -> bytes:
        """The first event; until then an error can still be an answer of its own."""
        await self._job.start()
        first = await self.next()
        assert first is not None
        return first

    async def next(self) -> bytes | None:
        delta = await self._job.next()
        if delta is not None:
            return self._chunk(delta)
        if self._done:
            return None
        self._done = True
        if not self._include_usage:
            return DONE
        return (
            self._head
            + b',"choices":[],"usage":'
            + encode(_usage(self._job, self._job.completion_tokens))
            + b"}\n\n"
            + DONE
        )

    async def close(self) -> None:
        await self._job.close()

    def _chunk(self, delta: Delta) -> bytes:
        first = delta.index not in self._begun
        if first:
            self._begun.add(delta.index)
        part = self._told.part(delta)
        logprobs = b"null" if part is None else encode(part)
        end = b',"logprobs":%b,"finish_reason":null' % logprobs
        if delta.finish_reason is not None:
            end = b',"logprobs":%b,"finish_reason":"%b","stop_reason":%b' % (
                logprobs,
                delta.finish_reason.encode(),
                encode(delta.stop_reason),
            )
        if self._job.wants_ids:
            end += b',"token_ids":' + encode(list(delta.token_ids))
        text = self._shape.piece(delta.index, delta.text, first)
        if self._usage_so_far:
            self._tokens += len(delta.token_ids)
            self._tail = b'}],"usage":%b}\n\n' % encode(_usage(self._job, self._tokens))
        return b'%b,"choices":[{"index":%d,%b%b%b' % (self._head, delta.index, text, end, self._tail)
