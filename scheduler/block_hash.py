"""Names of block contents: a chained hash over all tokens up to and with the block, and the key of the prefix map.

H_i = BLAKE2b-128(H_{i-1} ‖ tokens_i as int32 LE); H_-1 is keyed with the deployment's secret and tags the cache salt
and the adapter apart: nobody without the key can aim at another's blocks, and "salt x" never equals "adapter x".
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16
_UNKEYED = blake2b(digest_size=HASH_BYTES)
"""Copied for each block: a third cheaper than a new one."""


def root_hash(key: bytes, cache_salt: str = "", adapter: str = "") -> bytes:
    """H_-1 of a chain: 16 bytes. `key`: the deployment's secret, at most 64 bytes."""
    digest = blake2b(key=key, digest_size=HASH_BYTES, person=b"pageplane")
    for part in (cache_salt.encode(), adapter.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def next_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """H_i from H_{i-1} and the block's tokens (int32 little-endian, block_size of them)."""
    state = _UNKEYED.copy()
    state.update(parent)
    state.update(token_bytes)
    return state.digest()


def extend_chain(hashes: list[bytes], root: bytes, following: bytes, block_size: int) -> None:
    """Append to `hashes` those of the full blocks in `following`: the tokens behind the hashed, int32 little-endian."""
    step = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(following) - step + 1, step):
        parent = next_hash(parent, following[start : start + step])
        hashes.append(parent)


_GROUP_SUFFIX = [bytes([group]) for group in range(256)]


def cache_key(block_hash: bytes, group: int) -> bytes:
    """Key of the prefix map: the same tokens are another block in each cache group."""
    return block_hash + _GROUP_SUFFIX[group]


def cache_keys(block_hashes: Iterable[bytes], group: int) -> list[bytes]:
    """`cache_key` of each."""
    suffix = _GROUP_SUFFIX[group]
    return [block_hash + suffix for block_hash in block_hashes]
