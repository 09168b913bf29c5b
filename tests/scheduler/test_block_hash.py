"""Names of contents: chained, keyed, tagged, the same in every process of a deployment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.arrays import pack
from scheduler.block_hash import HASH_BYTES, cache_key, extend_chain, next_hash, root_hash

KEY = b"k" * 32


def chain(tokens: list[int], block_size: int = 4, root: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root or root_hash(KEY), pack(tokens), block_size)
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_names_everything_before_it_too() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]
    assert chain([1, 2, 3, 4, 9, 9, 9, 9])[0] == a[0]


def test_a_chain_grows_as_if_hashed_at_once() -> None:
    whole = chain(list(range(20)))
    grown = chain(list(range(8)))
    extend_chain(grown, root_hash(KEY), pack(list(range(8, 20))), 4)
    assert grown == whole


def test_salt_and_adapter_of_one_name_differ() -> None:
    roots = {root_hash(KEY), root_hash(KEY, "x"), root_hash(KEY, "", "x"), root_hash(KEY, "x", "x")}
    assert len(roots) == 4


@pytest.mark.parametrize(("one", "other"), [(("ab", "c"), ("a", "bc")), (("a\0", ""), ("a", "\0"))])
def test_salt_and_adapter_do_not_run_together(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert root_hash(KEY, *one) != root_hash(KEY, *other)


def test_another_key_names_the_same_content_otherwise() -> None:
    assert root_hash(KEY) != root_hash(b"j" * 32)


def test_groups_have_keys_of_their_own() -> None:
    block_hash = chain([1, 2, 3, 4])[0]
    assert len(block_hash) == HASH_BYTES
    assert len({cache_key(block_hash, group) for group in range(256)}) == 256


def test_token_values_are_not_their_concatenation() -> None:
    assert next_hash(b"p", pack([1, 23])) != next_hash(b"p", pack([12, 3]))


def test_two_processes_name_the_same_content_equally() -> None:
    """Whatever PYTHONHASHSEED they run under."""
    program = (
        "from protocol.arrays import pack\n"
        "from scheduler.block_hash import *\n"
        "h = []\n"
        "extend_chain(h, root_hash(b'k' * 32, 'salt'), pack(list(range(12))), 4)\n"
        "print([x.hex() for x in h])"
    )
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    here = chain(list(range(12)), root=root_hash(KEY, "salt"))
    assert outputs == {f"{[block_hash.hex() for block_hash in here]}\n"}
