"""The rest between two steps, in which this worker's cores are lent to another's prompt: as long as the scheduler says.

It only knows moments and lengths; waiting is the loop's, which listens meanwhile.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocol.arrays import pack
from protocol.messages import ModelRunnerOutput

_Message = TypeVar("_Message", bound=msgspec.Struct)


class Rest:
    """No rest until it is given a length. Moments in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.length_s = 0.0
        self.ended_at = 0.0
        """End of the last step."""
        self.taken_s = 0.0
        """Before the step that runs or comes."""

    def left_s(self, now: float) -> float:
        """How long the next step has to wait, at most 0 if it need not. Time without a plan counts as rest."""
        return self.ended_at + self.length_s - now

    def taken(self, seconds: float) -> None:
        """So long a step that could have begun was kept waiting."""
        self.taken_s += seconds

    def add_to(self, message: _Message) -> _Message:
        """The message; a result with the rest before its step, if there was any."""
        if not self.taken_s or not isinstance(message, ModelRunnerOutput):
            return message
        rested, self.taken_s = pack([round(self.taken_s * 1e6)]), 0.0
        return msgspec.structs.replace(message, timings_us=message.timings_us + rested)
