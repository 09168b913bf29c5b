"""Which replicas rest between their steps for the sake of a long prompt that another one computes, and how long.

Workers lend their cores while they are outside a step, but one that decodes is always inside. So a long prompt would
be computed by its own worker's cores alone, and the streams beside it would bear all of its cost
(`scheduler.step_budget`), while those of other workers notice nothing. Instead all streams of the machine bear the
same, SHARED times the stretch: a replica that only decodes waits after each step, so long that its streams are as much
slower and no more, and the prompt gets its cores for that time. Pure: what there is to do is given; the same history
leads to the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scheduler.step_budget import SHARED

LONG_PROMPT = 1024
"""Tokens that a request has to compute when it is admitted, for which others rest. Shorter ones come soon in any case;
and where many come and go, workers that each do their own get more done than workers that help each other."""
MARGIN = 0.1
"""Share of the rest that the stretch allows which is not taken: no step takes exactly as long as expected."""
MOST_REST_S = 1.0
"""Longest rest, however long a step is."""
NEWS = 0.1
"""A worker is told of a new rest if it differs by more than this share from the old one."""


class Work(NamedTuple):
    """What a replica has to do."""

    long_prompt: bool
    """It computes a request that had LONG_PROMPT tokens to compute."""
    prompts: bool
    """It computes prompts, long or short."""
    num_decoding: int
    """Rows that decode."""


class Rests:
    """The rule. stretch: see `EngineConfig.max_step_stretch`; 0: nobody rests."""

    def __init__(self, stretch: float):
        self.stretch = stretch

    def who(self, work: Mapping[int, Work], waiting: int) -> list[int]:
        """The replicas that shall rest now. work: by replica, of those that share the machine's cores; waiting:
        requests in the queue. While any wait nobody rests: they are to be admitted as soon as a step ends."""
        if not self.stretch or waiting or not any(todo.long_prompt for todo in work.values()):
            return []
        return [replica for replica, todo in work.items() if todo.num_decoding and not todo.prompts]

    def length_s(self, decode_s: float | None) -> float:
        """How long a replica rests whose steps take `decode_s`; not at all while that is not known."""
        if decode_s is None or not self.stretch:
            return 0.0
        return min(MOST_REST_S, (1.0 - MARGIN) * (SHARED * self.stretch - 1.0) * decode_s)


def is_news(rest_s: float, told_s: float) -> bool:
    """Whether a worker that was told to rest so long is to be told anew."""
    return abs(rest_s - told_s) > NEWS * told_s
