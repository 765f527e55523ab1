"""Random bits from counters: SplitMix64's output function (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014)."""

import secrets
from typing import Any, Final

import numpy as np

from .jit import inline, kernel

SECRET: Final = secrets.randbits(62)
"""Of this process, for hash tables over given numbers, so that nobody can choose numbers that all collide. No result
depends on it. Kernels take it as an argument: a constant would be in machine code that other processes load."""


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """SplitMix64's output function."""
    value = np.uint64(value + np.uint64(0x9E3779B97F4A7C15))
    value = np.uint64((value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    value = np.uint64((value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(value ^ (value >> np.uint64(31)))


@inline
def keyed_hash(value: Any, secret: int) -> np.uint64:
    """What hash tables place an int64 by."""
    return mix64(np.uint64(value) ^ np.uint64(secret))


@inline
def unit(bits: np.uint64) -> np.float64:
    """float64 in [0, 1) from the top 53 bits."""
    return np.float64(np.uint64(bits >> np.uint64(11))) * (1.0 / 9007199254740992.0)
