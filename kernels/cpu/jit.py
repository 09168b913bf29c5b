"""How the CPU kernels are compiled: no GIL, cached on disk. Knows Numba's settings; knows no kernel.

The cache lies under NUMBA_CACHE_DIR if that is set, else under the user's cache folder, never beside the sources,
so that an installation may be read-only; if neither can be written, under a temporary folder. The folder's name has a
digest of this package's sources: Numba itself notices changes only in the file of the function it compiles, and not
in the emitters of vectors.py that the function calls.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config as numba_config

config: Any = numba_config  # its settings are made at run time, so a type checker knows none


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache_dir() -> Path:
    """The first folder of the list above that can be made and written."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = f"kernels-{_source_digest()}"
    candidates = ([Path(asked)] if asked else []) + [Path(home) / "pageplane" / "numba"]
    for candidate in candidates:
        folder = candidate / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="pageplane-numba-"))


CACHE_DIR = _cache_dir()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call, without the GIL, and keep the machine code in CACHE_DIR."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(CACHE_DIR)  # read by Numba while it decorates
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before


def work(function: Callable[..., Any]) -> Any:
    """A function of three int64 to one that is called by its address, `.address`: what a `team.Team` shares out."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(CACHE_DIR)
    try:
        signature = numba.int64(numba.int64, numba.int64, numba.int64)
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before


def part(function: Callable[..., Any]) -> Any:
    """A function that kernels call: compiled into each of them, so it needs no cache of its own."""
    return numba.njit(nogil=True, error_model="numpy")(function)
