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

        async def answer(client: AsyncClient, question: Question) -> Completion:
            nonlocal total
            chunks = []
            async for chunk in client.generate(question.prompt, question.sampling, cache_salt=question.salt):
                chunks.append(chunk)
                total += len(chunk.token_ids)
                on_tokens(total)
            return Completion.join(chunks)

        async with AsyncClient(endpoint) as client:
            await client.tokenizer()
            return await asyncio.gather(*(answer(client, question) for question in questions))

    return asyncio.run(run())


def ask_each(endpoint: str, questions: Sequence[Question]) -> list[Completion]:
    """One after the other: each is alone when it runs."""
    return [answer for question in questions for answer in ask_all(endpoint, [question])]


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]
