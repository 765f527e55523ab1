"""Random bits from counters: SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014)."""

import secrets
from typing import Any, Final

import numpy as np

from .jit import inline, kernel, uncounted_inline

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_A: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B: Final = np.uint64(0x94D049BB133111EB)

SECRET: Final = secrets.randbits(62)
"""Of this process, for hash tables over given numbers, so that nobody can choose numbers that all collide. No result
depends on it. Kernels take it as an argument: a constant would be in machine code that other processes load."""


@uncounted_inline
def mixed(value: Any) -> np.uint64:
    """SplitMix64's output function but for its first step, "Mix13" of D. Stafford: a mixer of 64 bits."""
    bits = np.uint64(value)
    bits = np.uint64((bits ^ (bits >> np.uint64(30))) * _MIX_A)
    bits = np.uint64((bits ^ (bits >> np.uint64(27))) * _MIX_B)
    return np.uint64(bits ^ (bits >> np.uint64(31)))


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """SplitMix64's output function."""
    return mixed(np.uint64(value + GOLDEN))


@uncounted_inline
def keyed_hash(value: Any, secret: int) -> np.uint64:
    """What hash tables place an int64 by."""
    return mixed(np.uint64(value) ^ np.uint64(secret))


@inline
def unit(bits: np.uint64) -> np.float64:
    """float64 in [0, 1) from the top 53 bits."""
    return np.float64(np.uint64(bits >> np.uint64(11))) * (1.0 / 9007199254740992.0)
