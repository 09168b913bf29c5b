"""Requests as pairs of lengths: seeded distributions, or a given file. Knows no allocator and no tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Item:
    """One request. `arrival`: the virtual step at which it is there."""

    prompt_len: int
    output_len: int
    arrival: int = 0

    @property
    def held(self) -> int:
        """Tokens whose keys and values it holds at its end: the last token it samples is never computed."""
        return self.prompt_len + self.output_len - 1


@dataclass(frozen=True)
class Load:
    """`name` says which distribution, with its parameters, as every figure names it."""

    name: str
    items: tuple[Item, ...]

    @property
    def longest(self) -> int:
        return max(item.held for item in self.items)


class BadTrace(ValueError):
    """The file is not a trace; the message says which line, and why."""


def uniform(count: int, seed: int, rate: float = 0.0) -> Load:
    """Prompts and outputs uniform on 1…512 and 1…511: lengths at every rest modulo every block size up to 256."""
    rng = np.random.default_rng([seed, 1])
    return _load(
        "uniform: prompt 1…512, output 1…511", rng.integers(1, 513, count), rng.integers(1, 512, count), rng, rate
    )


def chat(count: int, seed: int, rate: float = 0.0) -> Load:
    """Log-normal, as lengths of conversations are: many short ones and a long tail, cut at 1,024 each."""
    rng = np.random.default_rng([seed, 2])
    prompts = np.clip(np.rint(rng.lognormal(np.log(160), 1.0, count)), 1, 1024)
    outputs = np.clip(np.rint(rng.lognormal(np.log(120), 0.8, count)), 1, 1024)
    return _load(
        "chat: log-normal, prompt median 160 (sigma 1.0), output median 120 (sigma 0.8), each cut at 1,024",
        prompts, outputs, rng, rate,
    )  # fmt: skip


def short_chat(count: int, seed: int) -> Load:
    """Likewise, shorter and with a shorter tail: for servers on a CPU, in minutes."""
    rng = np.random.default_rng([seed, 3])
    prompts = np.clip(np.rint(rng.lognormal(np.log(64), 0.8, count)), 1, 192)
    outputs = np.clip(np.rint(rng.lognormal(np.log(32), 0.8, count)), 2, 64)
    return _load(
        "short chat: log-normal, prompt median 64 (sigma 0.8, cut at 192), output median 32 (sigma 0.8, 2…64)",
        prompts, outputs, rng, 0.0,
    )  # fmt: skip


def from_file(path: Path) -> Load:
    """A line for each request, JSON: prompt_len, output_len, and if given arrival (a step). Raises BadTrace."""
    items = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            item = Item(int(fields["prompt_len"]), int(fields["output_len"]), int(fields.get("arrival", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadTrace(f"{path}, line {number}: {error!r}") from None
        if item.prompt_len < 1 or item.output_len < 1 or item.arrival < 0:
            raise BadTrace(f"{path}, line {number}: lengths must be at least 1, arrival at least 0")
        items.append(item)
    if not items:
        raise BadTrace(f"{path} has no request")
    return Load(f"file: {path.name}", tuple(sorted(items, key=lambda item: item.arrival)))


def _load(
    name: str,
    prompts: Sequence[float] | np.ndarray,
    outputs: Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    rate: float,
) -> Load:
    """rate: mean arrivals a step, Poisson; 0: all are there at the start."""
    arrivals = np.cumsum(rng.exponential(1 / rate, len(prompts))).astype(int) if rate else np.zeros(len(prompts), int)
    items = tuple(Item(int(p), int(o), int(a)) for p, o, a in zip(prompts, outputs, arrivals.tolist(), strict=True))
    when = f"Poisson arrivals, {rate:g} a step" if rate else "all waiting at the start"
    return Load(f"{name}; {len(items)} requests, {when}", items)
