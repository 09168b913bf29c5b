"""The page's own files, read once. Nothing is built, nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""The page runs its own code only and shows in no other's frame, where its button could be clicked unseen."""


@dataclass(frozen=True)
class File:
    """content: as sent; tag: its ETag."""

    content: bytes
    media_type: str
    tag: str


def load() -> dict[str, File]:
    """By name."""
    found = {}
    for entry in files(__package__).joinpath("static").iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found
