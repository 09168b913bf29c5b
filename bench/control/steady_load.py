"""A client whose requests decode on and on, and which reads what the scheduler keeps of their steps."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import zmq
from numpy.typing import NDArray

from bench.control.driver import random_tokens
from protocol import codec
from protocol import messages as m
from protocol.arrays import unpack
from protocol.sockets import connect_dealer, fresh_identity

STEPS_A_LOOK = 240
"""At most so many between two looks: fewer than the scheduler keeps, so none is lost."""
SETTLE_STEPS = 8
"""Steps behind a look that do not count: it cost the scheduler time."""
SILENCE_S = 60.0


class LoadFailed(RuntimeError):
    """The deployment refused a request, ended one, or fell silent; the message says which."""


class SteadyLoad:
    """A DEALER on the client plane at `endpoint`. Use as a context manager."""

    def __init__(self, endpoint: str):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, endpoint, fresh_identity("bench"))

    def __enter__(self) -> SteadyLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def start(self, prompt_lens: Sequence[int], max_tokens: int) -> None:
        """Submit a request for each length; returns when all decode."""
        rng = random.Random(1)
        sampling = m.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for length in prompt_lens:
            self._send(m.Submit(uuid.uuid4().hex, random_tokens(rng, length), sampling))
        seen = set[int]()
        while len(seen) < len(prompt_lens):
            seen.update(self._next_batch())

    def pass_steps(self, steps: int) -> None:
        """Let so many steps pass."""
        for _ in range(steps):
            self._next_batch()

    def steps(self, count: int, progress: Callable[[int], None]) -> NDArray[np.int32]:
        """The records of at least `count` further steps, int32 [n, STEP_COLUMNS]. progress(steps seen so far)."""
        kept: list[NDArray[np.int32]] = []
        number = self._look(0)[-1, 0]
        while (left := count - sum(map(len, kept))) > 0:
            self.pass_steps(min(STEPS_A_LOOK, left + SETTLE_STEPS))
            records = self._look(int(number))
            number = records[-1, 0]
            kept.append(records[SETTLE_STEPS:])
            progress(sum(map(len, kept)))
        return np.concatenate(kept)

    def _look(self, after: int) -> NDArray[np.int32]:
        self._send(m.GetSnapshot((after,)))
        while True:
            message = self._receive()
            if isinstance(message, m.Snapshot):
                return unpack(message.replicas[0].steps).reshape(-1, len(m.STEP_COLUMNS))

    def _next_batch(self) -> list[int]:
        """The handles in the next batch of tokens: there is one for each step."""
        while True:
            message = self._receive()
            match message:
                case m.TokenBatch():
                    return unpack(message.handles).tolist()
                case m.Rejected():
                    raise LoadFailed(f"a request was rejected: {message.message}")
                case m.Finished():
                    raise LoadFailed(f"a request ended ({message.reason}) while steps were still measured")

    def _send(self, message: m.ClientToScheduler) -> None:
        self._socket.send(codec.encode(message))

    def _receive(self) -> m.SchedulerToClient:
        if not self._socket.poll(round(SILENCE_S * 1000)):
            raise LoadFailed(f"the scheduler said nothing for {SILENCE_S:g} s")
        message: m.SchedulerToClient = codec.scheduler_to_client.decode(self._socket.recv())
        return message
