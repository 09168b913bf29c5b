"""Many streams at once against a deployment, each recorded as it came: the material that the chaos tests compare.

Requests mix greedy and sampled ones, so a run is repeatable token by token, and a run without kills is the golden one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from client import AsyncClient
from protocol.messages import SamplingParams, StructuredOutputsParams, Usage

NEVER_ATTACH_S = 600.0
"""The client's silence limit here: a client that asks for its tokens again would hide a loss."""

GRAMMAR = StructuredOutputsParams(regex="([a-z]{3,5}-[0-9]+;[A-Z]{2}){1000}")
"""Longer than any output here, so that none ends early."""


@dataclass(frozen=True)
class Wish:
    """One request: what is asked, without a name."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What came of it, as far as it must not depend on luck."""

    tokens: tuple[int, ...]
    reason: str
    usage: Usage


@dataclass
class Recording:
    """One stream while it runs. `arrivals`: (when, tokens so far) of each chunk; the first entry is the start."""

    wish: Wish
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def longest_silence_s(self) -> float:
        """The longest time between two chunks, the wait for the first one included."""
        times = [moment for moment, _ in self.arrivals]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


def wishes(count: int, max_tokens: int, prompt_len: int = 24, vocab: int = 256, seed: int = 0) -> list[Wish]:
    """Distinct prompts; every other request is sampled, with a seed of its own; two of three count their tokens; every
    eighth keeps to a grammar."""
    result = []
    for i in range(count):
        prompt = tuple((7 * i + 13 * seed + j * (3 + i)) % vocab for j in range(prompt_len + i % 5))
        temperature = 0.0 if i % 2 == 0 else 1.0
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95,
            seed=1000 + i,
            ignore_eos=True,
            repetition_penalty=(1.0, 1.0, 1.1)[i % 3],
            frequency_penalty=(0.0, 0.1, 0.05)[i % 3],
            structured_outputs=GRAMMAR if i % 8 == 5 else None,
        )
        result.append(Wish(prompt, sampling))
    return result


async def record(
    client: AsyncClient, wish: Wish, on_chunk: Callable[[Recording], None] = lambda recording: None, **options: object
) -> Recording:
    """Run one request to its end. `on_chunk` is called at once for every chunk."""
    recording = Recording(wish, arrivals=[(time.monotonic(), 0)])
    async for chunk in client.generate(wish.prompt, wish.sampling, detokenize=False, **options):  # type: ignore[arg-type]
        assert chunk.indices == tuple(range(len(recording.tokens), len(recording.tokens) + len(chunk.token_ids)))
        recording.tokens += chunk.token_ids
        recording.arrivals.append((time.monotonic(), len(recording.tokens)))
        if chunk.finish_reason is not None:
            assert chunk.usage is not None
            usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)  # cached_tokens may differ
            recording.answer = Answer(tuple(recording.tokens), chunk.finish_reason, usage)
        on_chunk(recording)
    return recording


async def record_all(
    client: AsyncClient, many: Sequence[Wish], on_chunk: Callable[[Recording], None] = lambda recording: None
) -> list[Recording]:
    """All of them at once."""
    return list(await asyncio.gather(*(record(client, wish, on_chunk) for wish in many)))


def run(endpoint: str, many: Sequence[Wish]) -> list[Answer]:
    """All of them at once over one connection, undisturbed; the answers in their order."""

    async def main() -> list[Recording]:
        async with AsyncClient(endpoint, silence_s=NEVER_ATTACH_S) as client:
            return await record_all(client, many)

    return answers(asyncio.run(main()))


def answers(recordings: Sequence[Recording]) -> list[Answer]:
    """Fails when a stream has not ended."""
    result = [recording.answer for recording in recordings if recording.answer is not None]
    assert len(result) == len(recordings), f"{len(recordings) - len(result)} streams have not ended"
    return result
