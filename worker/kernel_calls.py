"""How often each kernel ran in a step: proof that it was executed, told only while a trace is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from protocol.messages import ModelRunnerOutput

_Message = TypeVar("_Message", bound=msgspec.Struct)


class KernelCalls:
    """Off until `start`."""

    def __init__(self) -> None:
        self.active = False
        self._before: dict[str, int] = {}

    def start(self, counters: Mapping[str, int]) -> None:
        """Count from now on. counters: calls of each kernel so far."""
        self._before = dict(counters)
        self.active = True

    def stop(self) -> None:
        self.active = False

    def add_to(self, message: _Message, counters: Mapping[str, int]) -> _Message:
        """The message; a result with the calls since the one before, if they are counted."""
        if not self.active or not isinstance(message, ModelRunnerOutput):
            return message
        now = dict(counters)
        calls = {name: count - self._before.get(name, 0) for name, count in now.items()}
        self._before = now
        return msgspec.structs.replace(message, kernel_calls={name: count for name, count in calls.items() if count})
