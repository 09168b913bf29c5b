"""Questions that bear a number: each gets its own answers, one or several, in order, or the error that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4


class Call:
    """An open question. `query_id` goes with it; `next` gives what is answered."""

    def __init__(self) -> None:
        self.query_id = uuid4().hex
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def next(self, timeout_s: float) -> Any:
        """The next answer. Raises TimeoutError, or the error that ended the call."""
        answer = await asyncio.wait_for(self._answers.get(), timeout_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, answer: Any) -> None:
        self._answers.put_nowait(answer)


class Calls:
    """The open ones of a connection."""

    def __init__(self) -> None:
        self._open: dict[str, Call] = {}

    @contextmanager
    def open(self) -> Iterator[Call]:
        """A new question; what comes for it after the `with` is dropped."""
        call = Call()
        self._open[call.query_id] = call
        try:
            yield call
        finally:
            del self._open[call.query_id]

    def deliver(self, query_id: str, answer: Any) -> bool:
        """Hand an answer, or an error, to who asked; False if nobody did."""
        call = self._open.get(query_id)
        if call is not None:
            call.put(answer)
        return call is not None

    def fail_all(self, error: Exception) -> None:
        """No answer will come."""
        for call in self._open.values():
            call.put(error)
