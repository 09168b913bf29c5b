"""int32 arrays as bytes and back. The only place that knows their byte order."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec import MalformedFrame

INT32 = np.dtype("<i4")


def pack(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Values → int32 little-endian bytes. Raises OverflowError when a Python int does not fit."""
    if len(values) == 0:
        return b""
    return np.asarray(values, dtype=INT32).tobytes()


def packer(count: int) -> Callable[..., bytes]:
    """A function that packs exactly `count` Python ints: quicker than `pack` for a few. Raises struct.error when one
    does not fit."""
    return struct.Struct(f"<{count}i").pack


def unpack(data: bytes, name: str = "array") -> NDArray[np.int32]:
    """Bytes → int32 [n], a read-only view. Raises MalformedFrame when the bytes are no whole number of elements."""
    if len(data) % 4:
        raise MalformedFrame(f"{name}: {len(data)} bytes are no int32 array")
    return np.frombuffer(data, dtype=INT32)
