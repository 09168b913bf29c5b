"""Random numbers of a token: a function of its request's seed and its position, of nothing else.

So a draw does not depend on the batch, on the history of the process or on the device, and a request that is moved,
preempted or recovered goes on with the numbers it would have had. A draw takes several, by index. Modulo 2⁶⁴:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    key(seed, position) = mix(mix(seed + G) + G * (position + 1)),  G = 0x9E3779B97F4A7C15
    uniform(seed, position, index) = ((mix(key + G * (index + 1)) >> 12) + 1/2) * 2⁻⁵²

mix is the finaliser of SplitMix64 (Steele, Lea and Flood 2014; Vigna's splitmix64.c), and the numbers of one key are
the stream of a SplitMix64 that starts there; the inner mixes keep neighbouring seeds and positions from sharing one
stream at an offset.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def uniform_numpy(seeds: np.ndarray, positions: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """float64 in (0, 1), ends excluded, of uint64 seeds and non-negative integer positions and indices; they are
    broadcast. The reference."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTOR_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTOR_2)
        return z ^ (z >> np.uint64(31))

    def step(numbers: np.ndarray) -> np.ndarray:
        return gamma * (np.asarray(numbers).astype(np.uint64) + np.uint64(1))

    with np.errstate(over="ignore"):
        gamma = np.uint64(_GAMMA)
        key = mix(mix(np.asarray(seeds, np.uint64) + gamma) + step(positions))
        z = mix(key + step(indices))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def uniform(seeds: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """The same on any device, bit for bit: int64 seeds (the bits of the uint64), positions, indices → float64."""
    gamma = _signed(_GAMMA)
    key = _mix(_mix(seeds + gamma) + (positions + 1) * gamma)
    z = _mix(key + (indices + 1) * gamma)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52


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
