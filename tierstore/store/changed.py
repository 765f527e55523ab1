"""The rows in a reader's caches that changed in a newer version: read beside the caches, then copied into them.

They are kept in the memory that write staging has in a store open for writing. Rows that do not fit, likely next
victims, are evicted when the version is shown, and so are those that came in meanwhile.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ..cache import Listing
from ..kernels.arrays import Int64s, Words
from ..pool import Pool
from ..pool.converting import RowSource
from .listing import resident_keys

_FIND_ROWS: Final = 1 << 14
"""Lookups wait while so many rows are looked for: a millisecond or two."""
_CHUNK_BYTES: Final = 8 << 20
"""Of rows that are read at a time."""


class CachedRows(NamedTuple):
    """What changes in one pool's cache."""

    pool: Pool
    changed: Int64s
    """int64 [n]: keys of all rows that may be others in the newer version."""
    keys: Int64s
    """int64 [m], of those that were read."""
    weights: Words
    state: Words
    """uint64 [m, words], as they are in the newer version."""

    @classmethod
    def read(cls, pool: Pool, changed: Int64s, read: RowSource, room_bytes: int) -> "CachedRows":
        """``read`` those that are cached, of the newer version, as far as they fit ``room_bytes``."""
        layout, cached = pool.layout, _cached(pool, changed)
        room = room_bytes // layout.row_bytes
        if len(cached) > room:
            listed = resident_keys(pool)  # likely next victims first
            cached = listed[np.isin(listed, cached)][-room:] if room else cached[:0]
        count = len(cached)
        weights = np.zeros((count, layout.weight_words), np.uint64)
        state = np.zeros((count, layout.state_words), np.uint64)
        present = np.ones(count, np.bool_)
        step = max(1, _CHUNK_BYTES // layout.row_bytes)
        for first in range(0, count, step):
            part = slice(first, first + step)
            slots = np.arange(len(cached[part]), dtype=np.int32)
            read(cached[part], slots, weights[part], state[part], present[part])
        if not present.all():  # after a rollback the newer version may not have them
            cached, weights, state = cached[present], weights[present], state[present]
        return cls(pool, changed, cached, weights, state)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.arena.fill_lock, pool.arena.lock:
            slots = cache.find(self.keys)
            is_here = slots >= 0
            slots = slots[is_here]
            cache.weights[slots] = self.weights[is_here]
            cache.state[slots] = self.state[is_here]
            others = cache.find(self.changed)
            cache.evict(np.setdiff1d(others[others >= 0], slots))


def _cached(pool: Pool, keys: Int64s) -> Int64s:
    """Those of ``keys`` that a pool's cache has, in their order."""
    parts = [keys[:0]]
    for first in range(0, len(keys), _FIND_ROWS):
        part = keys[first : first + _FIND_ROWS]
        with pool.arena.lock:
            slots = pool.cache.find(part)
        parts.append(part[slots >= 0])
    return np.concatenate(parts)


def changed_rows(
    pools: Sequence[Pool], changed: Int64s, read: RowSource, room_bytes: int
) -> Sequence[CachedRows] | None:
    """``CachedRows.read`` of each pool, as far as there is room for all together.

    None if all that the pools hold is to be dropped: with device memory above them, whose rows are not looked for; and
    where there are none yet, as others may be made before the version is shown.
    """
    if not pools or any(pool.tier.on_device for pool in pools):
        return None
    rows = []
    for pool in pools:
        rows.append(CachedRows.read(pool, changed, read, room_bytes))
        room_bytes -= rows[-1].weights.nbytes + rows[-1].state.nbytes
    return rows


def rehearse(pool: Pool, read: RowSource) -> None:
    """Read a cached row again, of the version that is shown, and list some: what following uses is compiled then."""
    cache = pool.cache
    with pool.arena.lock:
        cache.list_more(Listing(), 1)
        keys = cache.keys_of(cache.resident_slots()[-1:])
    rows = CachedRows.read(pool, keys, read, pool.layout.row_bytes)
    rows._replace(changed=keys[:0]).show()  # a row that was never written stays, too
