"""One request through its life: what it asked for, which tokens it has, and the table of its legal moves."""

from __future__ import annotations

from enum import Enum
from math import nan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.messages import FinishReason, LogprobsLists, SamplingParams, Usage

if TYPE_CHECKING:
    from scheduler.block import KVCacheBlock


class RequestState(Enum):
    """Where a request stands. On a worker only RUNNING has a row."""

    WAITING = "waiting"
    """In the queue: new, preempted or recovered. A preempted one may still have tokens in flight."""
    RUNNING = "running"
    """Bound to a row of a replica."""
    DRAINING = "draining"
    """Its last token is in flight or it can grow no further; row and blocks are given back already."""
    FINISHED = "finished"


_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.DRAINING, RequestState.FINISHED}),
    RequestState.DRAINING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A move that the table of states does not allow; the request is as it was."""


class Request:
    """A request as the scheduler knows it.

    `tokens` int32 [num_committed]: prompt, then committed output, while no row holds the request; while RUNNING the
    row's arrays own them (`scheduler.batch`) and `tokens` is what it had when admitted.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "arrived_at",
        "binding",
        "block_hashes",
        "blocks",
        "cached_tokens",
        "connection",
        "first_token_at",
        "handle",
        "in_flight",
        "last_token_at",
        "limit",
        "logprobs",
        "num_hit_blocks",
        "num_prompt_logprobs",
        "overtaken",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "replica",
        "request_id",
        "root",
        "row",
        "sampling",
        "state",
        "stop_ids",
        "tokens",
        "void_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        limit: int,
        stop_ids: tuple[int, ...],
        root: bytes,
        arrival: int,
        priority: int = 0,
        connection: int = 0,
        handle: int = 0,
    ):
        self.request_id = request_id
        self.sampling = sampling
        self.prompt_len = len(prompt)
        self.limit = limit
        """Total length (prompt and output) at which it ends."""
        self.stop_ids = stop_ids
        self.root = root
        self.arrival = arrival
        self.priority = priority
        self.connection = connection
        self.handle = handle
        self.state = RequestState.WAITING
        self.tokens = prompt
        self.block_hashes: list[bytes] = []
        """Hash chain of its full blocks of committed tokens, as far as computed; survives preemption and death."""
        self.blocks: tuple[list[KVCacheBlock], ...] = ()
        """Per cache group: its block table while RUNNING, else empty."""
        self.num_hit_blocks = 0
        """Leading blocks that it found in the prefix cache; those behind are its own."""
        self.replica: int | None = None
        self.row: int | None = None
        self.binding = 0
        """Number of its latest admission; a result counts only for the admission that caused it."""
        self.in_flight = 0
        """While WAITING or DRAINING: sampled tokens that its issued plans still owe."""
        self.void_reason: FinishReason | None = None
        """While DRAINING: how it ends if the tokens in flight do not end it."""
        self.cached_tokens: int | None = None
        self.overtaken = 0
        self.arrived_at = 0.0
        """Moments are seconds of the engine's clock."""
        self.admitted_at: float | None = None
        """When it first got a row."""
        self.first_token_at: float | None = None
        self.last_token_at = nan
        """When its latest token was committed; while RUNNING the row's array owns it."""
        self.logprobs: dict[int, LogprobsLists] = {}
        """By output index, if its client asked: what a client that attaches is told again."""
        self.prompt_logprobs: list[LogprobsLists] = []
        """What its client was told of the prompt, one after the other, from the second token on."""
        self.num_prompt_logprobs = 1
        """Prompt tokens dealt with in them, the first one, of which nothing is told, included."""

    @property
    def prompt_logprobs_due(self) -> bool:
        """Whether its client still waits for log-probabilities of the prompt."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.prompt_len

    @property
    def order(self) -> tuple[int, int]:
        """Queue order: first served first; the greatest is the first victim."""
        return (self.priority, self.arrival)

    @property
    def num_output(self) -> int:
        """Committed output tokens; valid while no row holds the request."""
        return len(self.tokens) - self.prompt_len

    @property
    def usage(self) -> Usage:
        """Valid while no row holds the request."""
        return Usage(self.prompt_len, self.num_output, self.cached_tokens or 0)

    def append_late(self, token: int) -> None:
        """Commit a token that was in flight when the request lost its row."""
        self.tokens = np.append(self.tokens, np.int32(token))

    def move(self, state: RequestState) -> None:
        """Change state. Raises IllegalTransition, and changes nothing, when the table forbids it."""
        if state not in _MOVES[self.state]:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} → {state.value}")
        self.state = state

    def ends_with(self, token: int, length: int) -> FinishReason | None:
        """How the request ends when `token` makes it `length` tokens long; None: it goes on."""
        if token in self.stop_ids and length - self.prompt_len >= self.sampling.min_tokens:
            return "stop"
        return "length" if length >= self.limit else None
