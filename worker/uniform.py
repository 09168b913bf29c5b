"""The random number of a token: a function of its request's seed and its position, of nothing else.

So a draw does not depend on the batch, on the history of the process or on the device, and a request that is moved,
preempted or recovered goes on with the numbers it would have had. In arithmetic modulo 2⁶⁴:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    uniform(seed, position) = (mix(mix(seed + G) + G * (position + 1)) >> 11) * 2⁻⁵³,  G = 0x9E3779B97F4A7C15

mix is the finaliser of SplitMix64 (Steele, Lea and Flood 2014; Vigna's splitmix64.c); the inner mix keeps
neighbouring seeds from sharing one sequence at an offset.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def uniform_numpy(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) of uint64 seeds and non-negative integer positions of one shape. The reference."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
        return z ^ (z >> np.uint64(31))

    with np.errstate(over="ignore"):
        gamma = np.uint64(_GAMMA)
        z = mix(np.asarray(seeds, np.uint64) + gamma)
        z = mix(z + gamma * (np.asarray(positions).astype(np.uint64) + np.uint64(1)))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """The same on any device, bit for bit: int64 seeds (the bits of the uint64) and positions → float64."""
    z = _mix(seeds + _signed(_GAMMA))
    z = _mix(z + (positions + 1) * _signed(_GAMMA))
    return _shift(z, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_FACTOR_1)
    z = (z ^ _shift(z, 27)) * _signed(_FACTOR_2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, count: int) -> Tensor:
    """Logical right shift of int64, whose own shift copies the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """A uint64 as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
