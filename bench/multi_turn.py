"""Conversations: each turn sends the whole history again, with the server's own answers in it. Knows no server.

The history of a target has that target's answers, as a chat has: their lengths are equal everywhere, their tokens need
not be. What the later turns cost is what a prefix cache saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from bench.workload import RandomWorkload, Request, Turn


@dataclass(frozen=True)
class MultiTurn(RandomWorkload):
    """`num_prompts` conversations; a first prompt is as in RandomWorkload, and `turns` - 1 further ones follow it."""

    kind: ClassVar[str] = "multi-turn"

    num_prompts: int = 16
    turns: int = 4  # of each conversation
    turn_len: int = 64  # tokens that each further turn adds to the history, besides the answer
    think_s: float = 0.0  # mean of the exponentially distributed time from an answer to the next turn

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "turns", "turn_len")
        self._at_least(0, "think_s")

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.turns

    def requests(self, round_index: int) -> list[Request]:
        rng = np.random.default_rng([self.seed, round_index, 3])
        more = self._draw(rng, self.num_prompts, self.turns - 1, self.turn_len)
        think = rng.exponential(self.think_s, (self.num_prompts, self.turns - 1)).tolist()
        return [
            replace(
                request,
                follow_ups=tuple(
                    Turn(tuple(tokens), self.output_len, pause) for tokens, pause in zip(more[i], think[i], strict=True)
                ),
            )
            for i, request in enumerate(super().requests(round_index))
        ]
