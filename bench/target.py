"""A server under measurement as the load generator sees it, and the flag that names one. Knows no wire format."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from bench.workload import Request


class TargetError(Exception):
    """A request failed at the server, or the server can't be reached. The message says which and how."""


class Target(Protocol):
    """A client of one server. Used by one event loop; `stream` may be called many times concurrently."""

    name: str  # unique within a run; the key of its results

    async def open(self) -> None:
        """Connect. Raises TargetError if the server isn't there."""

    def stream(self, request: Request, answer: list[int] | None = None) -> AsyncIterator[int]:
        """Send the request; for each chunk that arrives, yield the number (>= 1) of output tokens in it, at once.

        The ids of these tokens are appended to `answer`, if there is one, by the time the stream ends.
        Raises TargetError if the server reports a failure or the stream breaks off.
        """
        ...

    async def close(self) -> None:
        """Disconnect; safe to call whatever happened before."""


@dataclass(frozen=True)
class TargetSpec:
    """`--target KIND[=ADDRESS][,KEY=VALUE…]`, parsed."""

    kind: str  # "pageplane" or "openai"
    address: str | None  # endpoint or base URL; None: the client's default
    options: dict[str, str] = field(default_factory=dict)

    KEYS: ClassVar = {"pageplane": {"name"}, "openai": {"name", "model"}}

    @classmethod
    def parse(cls, text: str) -> TargetSpec:
        """Raises ValueError, naming the part that can't be read."""
        head, *pairs = text.split(",")
        kind, _, address = head.partition("=")
        if kind not in cls.KEYS:
            raise ValueError(f"target {text!r}: unknown kind {kind!r}; known: {', '.join(sorted(cls.KEYS))}")
        options = {}
        for pair in pairs:
            match = re.fullmatch(r"(\w+)=(.+)", pair)
            if match is None or match[1] not in cls.KEYS[kind]:
                known = ", ".join(sorted(cls.KEYS[kind]))
                raise ValueError(f"target {text!r}: can't read {pair!r}; options of {kind}: {known}")
            options[match[1]] = match[2]
        if kind == "openai" and not address:
            raise ValueError(f"target {text!r}: an openai target needs its base URL: openai=http://HOST:PORT")
        return cls(kind, address or None, options)


def unique_names(specs: list[TargetSpec]) -> list[str]:
    """A name for each target: its `name` option, else its kind; the second of a name becomes `name-2`, and so on."""
    names: list[str] = []
    for spec in specs:
        wanted = spec.options.get("name", spec.kind)
        name, n = wanted, 1
        while name in names:
            n += 1
            name = f"{wanted}-{n}"
        names.append(name)
    return names
