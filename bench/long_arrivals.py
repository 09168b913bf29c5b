"""Long prompts arrive, one after another, where a number of streams decode steadily. Knows targets by their protocol.

The order of a round: all streams of the background start; when each has brought `SETTLED_TOKENS` tokens, the first
long prompt is sent; when it has ended, and each stream has brought as many tokens again, the next; and so on. After the
last one the streams are cut off, which is no failure. A stream that reaches its `output_len` begins anew with another
prompt. So the background is there from the first long prompt to the last, with quiet times in between to compare with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bench.load import Clock, OnDone, measure_request, stream_into
from bench.record import Observed, RequestRecord
from bench.target import Target
from bench.workload import RandomWorkload, Request

SETTLED_TOKENS = 8


@dataclass(frozen=True)
class LongArrivals(RandomWorkload):
    """`num_prompts` long prompts; the other lengths of RandomWorkload are those of the background streams."""

    kind: ClassVar[str] = "long-arrivals"

    num_prompts: int = 6
    input_len: int = 64
    output_len: int = 2048  # more than a round should need: streams that begin anew together would disturb each other
    long_input_len: int = 2048  # tokens of a long prompt, all random
    long_output_len: int = 16  # tokens generated for it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "long_input_len", "long_output_len")
        if self.output_len <= SETTLED_TOKENS:
            raise ValueError(
                f"output_len is {self.output_len}; a stream of the background needs more than {SETTLED_TOKENS} tokens"
            )

    def requests(self, round_index: int) -> list[Request]:
        """The long prompts of one round."""
        rng = np.random.default_rng([self.seed, round_index, 1])
        prompts = self._draw(rng, self.num_prompts, self.long_input_len)
        return [Request(i, tuple(prompt), self.long_output_len) for i, prompt in enumerate(prompts)]

    def background(self, round_index: int) -> Iterator[Request]:
        """Requests for the streams of one round, without end."""
        rng = np.random.default_rng([self.seed, round_index, 2])
        prefixes = self._draw(rng, self.num_prefixes, self.prefix_len)
        index = 0
        while True:
            prompt = prefixes[index % self.num_prefixes] + self._draw(rng, self.input_len)
            yield Request(index, tuple(prompt), self.output_len)
            index += 1


@dataclass(frozen=True)
class BesideStreams:
    """A load: the long prompts of the workload, one at a time, beside `concurrency` streams of its background."""

    workload: LongArrivals
    concurrency: int

    def arrivals_as_json(self) -> dict[str, Any]:
        return {"process": "sequential", "request_rate": None, "burstiness": None}

    async def run(self, target: Target, round_index: int, on_done: OnDone, clock: Clock, timeout_s: float) -> Observed:
        """A stream that fails is a failed record of the background, and is missing from then on."""
        background = _Background(target, self.workload.background(round_index), self.concurrency, clock)
        records = []
        async with asyncio.TaskGroup() as group:
            background.start(group)
            for request in self.workload.requests(round_index):
                await background.settle(timeout_s)
                records.append(await measure_request(target, request, clock, timeout_s))
                on_done(records[-1])
            background.cut_off()
        return Observed(records, background.records)


class _Background:
    def __init__(self, target: Target, requests: Iterator[Request], num_streams: int, clock: Clock):
        self.records: list[RequestRecord] = []  # in order of their starts
        self._target = target
        self._requests = requests
        self._clock = clock
        self._num_tokens = [0] * num_streams  # of each stream, over all of its requests
        self._tasks: list[asyncio.Task[None]] = []
        self._given_up: dict[int, str] = {}  # stream -> why
        self._news = asyncio.Event()

    def start(self, group: asyncio.TaskGroup) -> None:
        self._tasks = [group.create_task(self._decode(i)) for i in range(len(self._num_tokens))]

    async def settle(self, timeout_s: float) -> None:
        """Wait until every stream that lives has brought SETTLED_TOKENS from now on; streams too slow are given up."""
        goals = [count + SETTLED_TOKENS for count in self._num_tokens]

        def late() -> list[int]:
            return [i for i, goal in enumerate(goals) if self._num_tokens[i] < goal and not self._tasks[i].done()]

        try:
            async with asyncio.timeout(timeout_s):
                while late():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            for i in late():
                self._given_up[i] = f"a stream of the background brought no {SETTLED_TOKENS} tokens in {timeout_s:g} s"
                self._tasks[i].cancel()

    def cut_off(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()

    async def _decode(self, stream: int) -> None:
        failed = False
        while not failed:
            request = next(self._requests)
            record = RequestRecord(request.output_len, self._clock())
            self.records.append(record)
            try:
                await stream_into(record, self._target, request, self._clock, lambda count: self._told(stream, count))
            except asyncio.CancelledError:
                record.output_len = record.num_tokens  # cut off, not failed
                record.error = self._given_up.get(stream)
                raise
            failed = record.failure is not None
        self._news.set()

    def _told(self, stream: int, count: int) -> None:
        self._num_tokens[stream] += count
        self._news.set()
