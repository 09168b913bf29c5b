"""Ask a deployment many things at once, and see the tokens as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from client import AsyncClient, Completion
from protocol.messages import SamplingParams


class Question(NamedTuple):
    """A prompt, as token ids, and how to answer it. Prefixes are shared only among questions of the same salt."""

    prompt: list[int]
    sampling: SamplingParams
    salt: str = ""


def under(salt: str, questions: Sequence[Question]) -> list[Question]:
    """The same questions, to a cache that knows nothing of the others."""
    return [question._replace(salt=salt) for question in questions]


def ask_all(
    endpoint: str,
    questions: Sequence[Question],
    *,
    on_tokens: Callable[[int], None] = lambda total: None,
) -> list[Completion]:
    """All at once over one connection; the answers in the order of the questions.

    on_tokens: told the number of output tokens that have come, of all questions together, whenever more come.
    """

    async def run() -> list[Completion]:
        total = 0

        def count(more: int) -> None:
            nonlocal total
            total += more
            on_tokens(total)

        async with AsyncClient(endpoint) as client:
            await client.tokenizer()
            return await asyncio.gather(*(_answer(client, question, count) for question in questions))

    return asyncio.run(run())


def ask_each(endpoint: str, questions: Sequence[Question]) -> list[Completion]:
    """One after the other: each is alone when it runs."""

    async def run() -> list[Completion]:
        async with AsyncClient(endpoint) as client:
            return [await _answer(client, question) for question in questions]

    return asyncio.run(run())


async def _answer(
    client: AsyncClient, question: Question, on_more: Callable[[int], None] = lambda more: None
) -> Completion:
    chunks = []
    async for chunk in client.generate(question.prompt, question.sampling, cache_salt=question.salt):
        chunks.append(chunk)
        on_more(len(chunk.token_ids))
    return Completion.join(chunks)


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]
