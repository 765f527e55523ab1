"""Spatial sampling: whether a row is in a sample is a matter of its key alone, so it is there with all its accesses.

A row is in the sample of rate r if the SplitMix64 output of its key, as a number of 64 bits, is below r * 2^64. So a
sample of a lower rate is part of one of a higher rate, and samples of other machines and times agree. After
C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad: Efficient MRC Construction with SHARDS, FAST 2015.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._jit import kernel
from ..init import mix64

__all__ = ["is_sampled", "last_hash", "select"]


def last_hash(rate: float) -> np.uint64:
    """The largest hash that is in the sample.

    Raises:
        ValueError: the rate is not in (0, 1], or so low that no row would be in it.
    """
    size = int(rate * 2.0**64) if 0 < rate <= 1 else 0
    if not size:
        raise ValueError(f"sampling rate {rate!r}: expected a number above 0, and at most 1")
    return np.uint64(size - 1)


def is_sampled(keys: NDArray[np.int64], rate: float) -> NDArray[np.bool_]:
    """Which rows are in the sample, bool [n]; errors as ``last_hash``.

    Args:
        keys: int64 [n], ``table index << 40 | row``.
    """
    chosen = np.empty(len(keys), np.bool_)
    _mark(keys, last_hash(rate), chosen)
    return chosen


@kernel
def _mark(keys: Any, last: Any, chosen: Any) -> None:
    for position in range(keys.shape[0]):
        chosen[position] = mix64(np.uint64(keys[position])) <= last


@kernel
def select(keys: Any, last: Any, positions: Any) -> int:
    """Write the positions of sampled rows into ``positions``, int64 [n], ascending; returns how many there are."""
    count = 0
    for position in range(keys.shape[0]):
        positions[count] = position
        count += mix64(np.uint64(keys[position])) <= last
    return count
