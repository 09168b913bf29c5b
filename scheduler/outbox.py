"""Messages that a slow client could not take yet: kept, merged, never dropped, and never in the way of others."""

from __future__ import annotations

from collections import deque

from protocol.logprobs import join, nothing
from protocol.messages import LogprobsLists, SchedulerToClient, TokenBatch


class Outbox:
    """Per client, in order, what its socket would not take. Bounded by what its requests may generate, since runs of
    token batches are merged into one."""

    def __init__(self) -> None:
        self._pending: dict[bytes, deque[SchedulerToClient]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def holds(self, identity: bytes) -> bool:
        """Whether something waits for this client; then everything later has to wait behind it."""
        return identity in self._pending

    def identities(self) -> list[bytes]:
        return list(self._pending)

    def add(self, identity: bytes, message: SchedulerToClient) -> None:
        """Append; a TokenBatch behind another becomes part of it."""
        queue = self._pending.setdefault(identity, deque())
        last = queue[-1] if queue else None
        if isinstance(message, TokenBatch) and isinstance(last, TokenBatch):
            queue.pop()
            message = TokenBatch(
                message.step,
                last.handles + message.handles,
                last.indices + message.indices,
                last.tokens + message.tokens,
                _joined(last, message),
            )
        queue.append(message)

    def first(self, identity: bytes) -> SchedulerToClient | None:
        """What is to be sent next; None: nothing waits."""
        queue = self._pending.get(identity)
        return queue[0] if queue else None

    def pop(self, identity: bytes) -> None:
        """The first message was sent."""
        queue = self._pending[identity]
        queue.popleft()
        if not queue:
            del self._pending[identity]

    def drop(self, identity: bytes) -> None:
        """The client is gone."""
        self._pending.pop(identity, None)


def _joined(first: TokenBatch, second: TokenBatch) -> LogprobsLists | None:
    """The log-probabilities of both."""
    if first.logprobs is None and second.logprobs is None:
        return None
    return join([batch.logprobs or nothing(len(batch.tokens) // 4) for batch in (first, second)])
