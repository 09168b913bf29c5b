"""Token ids → the bytes they stand for, one at a time. Joined they are the text, also where a character spans tokens.

A byte-level vocabulary writes each byte as one printable character (GPT-2, `bytes_to_unicode`); a SentencePiece one
writes ▁ for a space and <0xE4> for a byte that no token has. Added tokens, special ones among them, are their own text.
"""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """b"" for an id that the vocabulary lacks."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}


_BYTES = _byte_alphabet()
