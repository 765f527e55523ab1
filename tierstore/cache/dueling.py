"""The size of TinyLFU's window: two small caches replay a sample of the accesses, one by LRU, one by frequency.

The sample is by key, in proportion to the small caches' size over the real one's. So each small cache has about the hit
rate that the real cache would have under its policy. The window holds the whole cache, which is LRU, until frequency
leads by as many hits as a sixteenth of a small cache's slots. Then it holds a hundredth, until recency has made up that
lead. The lead is bounded on both sides, so old history delays no switch for long.

Sources: C. Waldspurger, T. Saemundson, I. Ahmad and N. Park, Cache modeling and optimization using miniature
simulations (USENIX ATC 2017); choosing by a sample of either policy, M. Qureshi, A. Jaleel, Y. Patt, S. Steely
and J. Emer, Adaptive insertion policies for high performance caching (ISCA 2007), set dueling; a bounded running sum
that turns at a threshold, E. Page, Continuous inspection schemes (Biometrika, 1954), CUSUM.
"""

from typing import Final

import numpy as np

from ..kernels.arrays import Bools, Int64s
from ..kernels.jit import uncounted_kernel as kernel
from .admission import replay_keys
from .books import CacheState, Tally, new_state, state_bytes_of
from .index import mixed_key

SAMPLED_ROWS: Final = 256
"""Slots of each small cache; those of the real one if it has fewer. Twice as many bring the worst cases of changing
accesses a sixth nearer to LRU, for twice the time."""
_ROWS_PER_LEAD: Final = 16
"""Slots of a small cache for each hit that frequency leads by at most. With twice as many, chance turns the window too
often; with half as many, it turns too late for caches that see 10 to 40 accesses a slot."""
_RECENCY_LEAD: Final = 4  # times as much, by which recency leads at most
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
def _sample(keys: Int64s, capacity: int, sampled_rows: int, positions: Int64s) -> int:
    """List the positions of the keys that are in the sample; returns how many.

    The sample's hash differs from the one that the small caches place keys by."""
    count = 0
    for i in range(keys.size):
        salted = (mixed_key(keys[i]) * _SALT) >> _HALF
        if (salted * np.uint64(capacity)) >> _HALF < np.uint64(sampled_rows):
            positions[count] = i
            count += 1
    return count


@kernel
def _score(by_frequency: Bools, by_recency: Bools, lead_max: int, standing: Int64s, turns: Int64s) -> int:
    """Bring ``standing`` (lead, whether frequency decides) up to date with these hits. List where that turns; returns
    how often."""
    lead, is_narrow = standing[0], standing[1]
    count = 0
    for i in range(by_frequency.size):
        lead += np.int64(by_frequency[i]) - np.int64(by_recency[i])
        lead = min(max(lead, -_RECENCY_LEAD * lead_max), lead_max)
        if (is_narrow == 0 and lead == lead_max) or (is_narrow == 1 and lead < 0):
            is_narrow = 1 - is_narrow
            turns[count] = i
            count += 1
    standing[0], standing[1] = lead, is_narrow
    return count


class Duel:
    """Chooses the window of one TinyLFU cache; sets it in ``state``.

    Args:
        state: the real cache's books.
    """

    def __init__(self, state: CacheState) -> None:
        self._tallies = state.tallies
        self._capacity = len(state.slots) - 1
        self._sampled_rows = min(self._capacity, SAMPLED_ROWS)
        self._recency = new_state(self._sampled_rows, "lru")
        self._frequency = new_state(self._sampled_rows, "tinylfu")
        self._frequency.tallies[Tally.WINDOW_LIMIT] = narrow_window(self._sampled_rows)
        self._tallies[Tally.WINDOW_LIMIT] = self._capacity
        self._lead_max = max(1, self._sampled_rows // _ROWS_PER_LEAD)
        self._standing = np.zeros(2, np.int64)

    def observe(self, keys: Int64s) -> Int64s:
        """These rows are accessed once each, in order.

        Returns:
            int64: positions of the accesses after which the window switches between wide and narrow.
        """
        positions = np.empty(len(keys), np.int64)
        positions = positions[: _sample(keys, self._capacity, self._sampled_rows, positions)]
        if not len(positions):
            return positions
        sampled = keys[positions]
        by_frequency: Bools = np.empty(len(sampled), np.bool_)
        by_recency = np.empty_like(by_frequency)
        replay_keys(self._frequency, sampled, by_frequency)
        replay_keys(self._recency, sampled, by_recency)
        turns = np.empty_like(positions)
        count = _score(by_frequency, by_recency, self._lead_max, self._standing, turns)
        found: Int64s = positions[turns[:count]]
        return found

    def turn(self) -> None:
        """Make the wide window narrow, or the narrow one wide."""
        both = self._capacity + narrow_window(self._capacity)
        self._tallies[Tally.WINDOW_LIMIT] = both - self._tallies[Tally.WINDOW_LIMIT]
