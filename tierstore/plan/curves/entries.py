"""A hash table for kernels: a number, not negative, beside each key (open addressing, linear probing)."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...kernels.hashing import mix64
from ...kernels.jit import prefetch_item
from ...kernels.jit import uncounted_inline as inline
from ...kernels.jit import uncounted_kernel as kernel

__all__ = ["empty_entries", "grown_entries", "is_half_full", "place_of", "prefetch_place"]

Int64s = NDArray[np.int64]

_AHEAD: Final = 12
"""Accesses whose entries are on their way from memory."""


def empty_entries(num_keys: int) -> Int64s:
    """For so many keys at least: int64 [2 m], m a power of two; key and number side by side, -1 where there is none."""
    return np.full(4 << max(2, (num_keys - 1).bit_length()), -1, np.int64)


def grown_entries(entries: Int64s) -> Int64s:
    """The same, in twice the room."""
    grown = np.full(2 * len(entries), -1, np.int64)
    _move(entries, grown)
    return grown


@inline
def is_half_full(entries: Any, num_keys: Any) -> Any:
    """Whether another key needs a larger table."""
    return 4 * num_keys >= entries.shape[0]


@inline
def _home(entries: Any, key: Any) -> Any:
    """Where the search for a key begins."""
    return np.int64(mix64(np.uint64(key)) & np.uint64(entries.shape[0] // 2 - 1)) << 1


@inline
def prefetch_place(entries: Any, keys: Any, position: Any) -> None:
    """Bring nearer what ``place_of`` will read some keys later."""
    if position + _AHEAD < keys.shape[0]:
        prefetch_item(entries, _home(entries, keys[position + _AHEAD]))


@inline
def place_of(entries: Any, key: Any) -> Any:
    """Where the key is, or may be put; its number is at the next place."""
    place = _home(entries, key)
    while entries[place + 1] >= 0 and entries[place] != key:
        place = (place + 2) & (entries.shape[0] - 1)
    return place


@kernel
def _move(old: Any, new: Any) -> None:
    for place in range(0, old.shape[0], 2):
        if old[place + 1] >= 0:
            target = place_of(new, old[place])
            new[target], new[target + 1] = old[place], old[place + 1]
