"""What is asked of a server: seeded prompts of random token ids. Knows no server, tokenizer or clock.

A *round* is one pass in which every target is given the same requests, one target after the other. Prompts depend on
(seed, round), so that targets meet equal work within a round, and no target meets a prompt again in a later one:
a prefix cache can't turn the random load into hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Request:
    """One prompt, and how many tokens must come back for it (end-of-text is ignored)."""

    index: int  # position in its round, 0-based
    prompt_token_ids: tuple[int, ...]
    output_len: int  # tokens


@dataclass(frozen=True)
class Workload:
    """Shape of the load. Each prompt is `prefix_len` shared tokens followed by `input_len` random ones of its own.

    The other kinds of load are built on this one.
    """

    kind: ClassVar[str] = "random"  # as --workload names it

    num_prompts: int = 48
    input_len: int = 256  # tokens of each prompt that no other prompt has
    output_len: int = 64  # tokens generated for each prompt
    prefix_len: int = 0  # tokens shared by all prompts of one prefix; 0: nothing is shared
    num_prefixes: int = 1  # prompts take the prefixes in turn; used only with prefix_len > 0
    seed: int = 1
    min_token_id: int = 1000  # ids are drawn from [min_token_id, max_token_id): above the special tokens
    max_token_id: int = 49000  # and below the vocabulary's end, of the default model

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len is {self.prefix_len}; it must not be negative")
        if not 0 <= self.min_token_id < self.max_token_id:
            raise ValueError(f"token ids [{self.min_token_id}, {self.max_token_id}) are an empty or negative range")

    @property
    def num_requests(self) -> int:
        """How many requests a round has."""
        return self.num_prompts

    def requests(self, round_index: int) -> list[Request]:
        """The requests of one round, the same at every call with this workload and `round_index`."""
        rng = np.random.default_rng([self.seed, round_index])
        low, high = self.min_token_id, self.max_token_id
        prefixes = rng.integers(low, high, (self.num_prefixes, self.prefix_len)).tolist()
        bodies = rng.integers(low, high, (self.num_prompts, self.input_len)).tolist()
        return [
            Request(i, tuple(prefixes[i % self.num_prefixes] + body), self.output_len) for i, body in enumerate(bodies)
        ]
