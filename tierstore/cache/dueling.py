"""How large TinyLFU's window is: two small caches replay a sample of the accesses, one by LRU and one by frequency.

The sample is by key: a row is in it or not, in proportion to what the small caches hold of the real one, so that each
hits about the share of its accesses that the real cache would hit under its policy. Once a capacity of accesses the
window is set to one of two sizes, by which of the two had more hits lately.

Sources: C. Waldspurger, T. Saemundson, I. Ahmad and N. Park, Cache modeling and optimization using miniature
simulations (USENIX ATC 2017); choosing by a sample of either policy, M. Qureshi, A. Jaleel, Y. Patt, S. Steely
and J. Emer, Adaptive insertion policies for high performance caching (ISCA 2007), set dueling.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._jit import uncounted_kernel as kernel
from .admission import replay_keys
from .base import Int64s
from .books import CacheState, Tally, new_state, state_bytes_of
from .index import mixed_key

__all__ = ["SAMPLED_ROWS", "Duel", "duel_bytes_of", "narrow_window"]

SAMPLED_ROWS: Final = 256
"""Slots of each small cache; those of the real one if it has fewer."""
_KEPT: Final = 0.8
"""What the lead so far counts for beside a new period. With 0.5, or with periods of a quarter, some drift that turns
back costs 1 to 2 points of hit rate."""
_WINDOW_SHARE: Final = 100
_HALF: Final = np.uint64(32)
_SALT: Final = np.uint64(0x9E3779B97F4A7C15)


def narrow_window(capacity: int) -> int:
    """Rows in the window when frequency decides."""
    return max(1, capacity // _WINDOW_SHARE)


def duel_bytes_of(capacity: int) -> int:
    """Bytes of a ``Duel``'s two small caches."""
    rows = min(capacity, SAMPLED_ROWS)
    return state_bytes_of(rows, "lru") + state_bytes_of(rows, "tinylfu")


@kernel
def _sample_keys(keys: Int64s, capacity: Any, sampled_rows: Any, sampled: Int64s) -> int:
    """Those of the keys that are in the sample; a hash of their own, for they are hashed again by the small caches."""
    count = 0
    for i in range(keys.size):
        salted = (mixed_key(keys[i]) * _SALT) >> _HALF
        if (salted * np.uint64(capacity)) >> _HALF < np.uint64(sampled_rows):
            sampled[count] = keys[i]
            count += 1
    return count


class Duel:
    """Owner of the window of one TinyLFU cache, whose ``state`` it sets.

    Args:
        state: the real cache's books.
    """

    def __init__(self, state: CacheState) -> None:
        self._tallies = state.tallies
        self._capacity = len(state.slots) - 1
        rows = min(self._capacity, SAMPLED_ROWS)
        self._recency = new_state(rows, "lru")
        self._frequency = new_state(rows, "tinylfu")
        self._frequency.tallies[Tally.WINDOW_LIMIT] = narrow_window(rows)
        self._tallies[Tally.WINDOW_LIMIT] = narrow_window(self._capacity)
        self._accesses = 0
        self._hits_ahead = 0
        self._lead = 0.0

    @property
    def accesses_left(self) -> int:
        """Accesses until the next choice, at least 1."""
        return self._capacity - self._accesses

    def observe(self, keys: Int64s) -> None:
        """These rows were accessed once each, in order; then choose, if it is time."""
        sampled = np.empty(len(keys), np.int64)
        count = _sample_keys(keys, self._capacity, len(self._recency.slots) - 1, sampled)
        if count:
            is_hit: NDArray[np.bool_] = np.empty(count, np.bool_)
            replay_keys(self._frequency, sampled[:count], is_hit)
            self._hits_ahead += int(np.count_nonzero(is_hit))
            replay_keys(self._recency, sampled[:count], is_hit)
            self._hits_ahead -= int(np.count_nonzero(is_hit))
        self._accesses += len(keys)
        if self._accesses >= self._capacity:
            self._choose()

    def _choose(self) -> None:
        self._lead = _KEPT * self._lead + self._hits_ahead
        self._accesses = self._hits_ahead = 0
        if self._lead:
            limit = self._capacity if self._lead < 0 else narrow_window(self._capacity)
            self._tallies[Tally.WINDOW_LIMIT] = limit
