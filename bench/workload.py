"""What is asked of a server: seeded prompts of random token ids. Knows no server, tokenizer or clock.

A *round* is one pass in which every target is given the same requests, one target after the other. Prompts depend on
(seed, round), so that targets meet equal work within a round, and no target meets a prompt again in a later one:
a prefix cache can't turn the random load into hits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Turn:
    """What a conversation goes on with after an answer."""

    token_ids: tuple[int, ...]  # appended to the history
    output_len: int  # tokens of the next answer
    think_s: float = 0.0  # from the end of the last answer until this is sent


@dataclass(frozen=True)
class Request:
    """One prompt, and how many tokens must come back for it (end-of-text is ignored)."""

    index: int  # position in its round, 0-based
    prompt_token_ids: tuple[int, ...]
    output_len: int  # tokens
    follow_ups: tuple[Turn, ...] = ()  # the further turns, if this begins a conversation
    arrival_s: float | None = None  # from the start of the round, where the workload itself says so


@dataclass(frozen=True)
class Workload(ABC):
    """What all kinds of load have."""

    kind: ClassVar[str]  # as --workload names it

    seed: int = 1
    min_token_id: int = 1000  # ids are drawn from [min_token_id, max_token_id): above the special tokens
    max_token_id: int = 49000  # and below the vocabulary's end, of the default model

    def __post_init__(self) -> None:
        if not 0 <= self.min_token_id < self.max_token_id:
            raise ValueError(f"token ids [{self.min_token_id}, {self.max_token_id}) are an empty or negative range")

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """How many answers a round asks for, each turn of a conversation counted."""

    @abstractmethod
    def requests(self, round_index: int) -> list[Request]:
        """The requests of one round, the same at every call with this workload and `round_index`."""

    def as_json(self) -> dict[str, Any]:
        """Its kind and its fields."""
        return {"kind": self.kind, **asdict(self)}

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def _draw(self, rng: np.random.Generator, *shape: int) -> Any:
        """Nested lists of random token ids."""
        return rng.integers(self.min_token_id, self.max_token_id, shape).tolist()


@dataclass(frozen=True)
class RandomWorkload(Workload):
    """Each prompt is `prefix_len` tokens that it shares with others, followed by `input_len` random ones of its own."""

    kind: ClassVar[str] = "random"

    num_prompts: int = 48
    input_len: int = 256  # tokens of each prompt that no other prompt has
    output_len: int = 64  # tokens generated for each prompt
    prefix_len: int = 0  # tokens shared by all prompts of one prefix; 0: nothing is shared
    num_prefixes: int = 1  # prompts take the prefixes in turn; used only with prefix_len > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_prompts", "input_len", "output_len", "num_prefixes")
        self._at_least(0, "prefix_len")

    @property
    def num_requests(self) -> int:
        return self.num_prompts

    def requests(self, round_index: int) -> list[Request]:
        rng = np.random.default_rng([self.seed, round_index])
        prefixes = self._draw(rng, self.num_prefixes, self.prefix_len)
        bodies = self._draw(rng, self.num_prompts, self.input_len)
        return [
            Request(i, tuple(prefixes[i % self.num_prefixes] + body), self.output_len) for i, body in enumerate(bodies)
        ]
