"""The rows that a pool has in memory, listed while others look up."""

import time
from typing import Final

import numpy as np

from ..cache import Listing
from ..kernels.arrays import Int64s
from ..pool import Pool

_PIECE_ROWS: Final = 1 << 14
"""Lookups wait while so many are listed: a millisecond."""
_PAUSE_SECONDS: Final = 1e-4
"""Long enough for a waiting thread to wake up and take the lock, which is not kept for it."""


def resident_keys(pool: Pool) -> Int64s:
    """Keys of the rows in a pool's cache, int64 [n], each once, likely next victims first.

    Every row that is resident throughout is listed. Rows that come or leave meanwhile may be, and the order is a hint:
    the lock is free between pieces of the list.
    """
    cache = pool.cache
    with pool.arena.lock:
        num_before = cache.counters().misses
    listing = Listing()
    is_more = True
    while is_more:
        with pool.arena.lock:
            is_more = cache.list_more(listing, _PIECE_ROWS)
            num_after = cache.counters().misses
        if is_more:
            time.sleep(_PAUSE_SECONDS)
    keys = listing.keys()
    if num_after == num_before:
        return keys
    _, places = np.unique(keys[::-1], return_index=True)  # a row that left and came back was used last
    return keys[np.sort(len(keys) - 1 - places)]
