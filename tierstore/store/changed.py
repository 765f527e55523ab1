"""The rows in a reader's caches that changed in a newer version: read beside the caches, then copied into them.

They are kept in the memory that write staging has in a store open for writing. Rows that do not fit, likely next
victims, are evicted when the version is shown. Pools note which rows come in meanwhile.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bools, Int64s, Words
from ..pool import Pool
from ..pool.arrivals import Arrivals, IsChanged
from ..pool.converting import RowSource
from .listing import resident_keys

_CHUNK_ROWS: Final = 1 << 15
"""Lookups wait while so many rows are compared: some milliseconds."""
_CHUNK_BYTES: Final = 8 << 20
"""Of rows that are read at a time, whether they are kept or not."""


class CachedRows(NamedTuple):
    """The rows in one pool's cache that changed in the newer version."""

    pool: Pool
    keys: Int64s
    """int64 [n], rows that were read."""
    weights: Words
    state: Words
    """uint64 [n, words], as they are in the newer version."""
    stale: Int64s
    """Keys of rows that were not read, to be evicted."""
    arrivals: Arrivals
    """Rows that came in since, from the version that is shown."""

    @classmethod
    def read(cls, pool: Pool, is_changed: IsChanged, read: RowSource, room_bytes: int) -> "CachedRows":
        """Find them, and ``read`` them, of the newer version, as far as they fit ``room_bytes``."""
        arrivals = Arrivals(is_changed)
        with pool.arena.fill_lock, pool.arena.lock:
            pool.filler.arrivals = arrivals  # notes from here on what comes in: the list may leave that out
        keys = resident_keys(pool)
        room = room_bytes // pool.layout.row_bytes
        parts, stale = [_read(pool, keys[:0], read)], [keys[:0]]
        # The last first: what there is no room for are then likely next victims.
        step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // pool.layout.row_bytes))
        for stop in range(len(keys), 0, -step):
            chunk = keys[max(0, stop - step) : stop]
            part, gone = _read_changed(pool, chunk[is_changed(chunk)], read, room)
            room -= len(part.keys)
            parts.append(part)
            stale.append(gone)
        again, weights, state = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls(pool, again, weights, state, np.concatenate(stale), arrivals)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.arena.fill_lock, pool.arena.lock:
            pool.filler.arrivals = None
            late = self.arrivals.keys(cache)
            late = late[~np.isin(late, self.keys)] if len(late) else late
            gone = cache.find(np.unique(np.concatenate([self.stale, late])))
            cache.evict(gone[gone >= 0])
            slots = cache.find(self.keys)
            here = slots >= 0
            cache.weights[slots[here]] = self.weights[here]
            cache.state[slots[here]] = self.state[here]


class _Rows(NamedTuple):
    keys: Int64s
    weights: Words
    state: Words

    def chosen(self, which: Bools | slice) -> "_Rows":
        return _Rows(self.keys[which], self.weights[which], self.state[which])


def _read_changed(pool: Pool, keys: Int64s, read: RowSource, room: int) -> tuple[_Rows, Int64s]:
    """Of rows that were written, those that changed, at most ``room`` of them; and the keys of rows to evict."""
    if not room:
        return _read(pool, keys[:0], read), keys
    rows = _read(pool, keys, read)
    stale = keys[~np.isin(keys, rows.keys)]  # after a rollback the newer version may not have them
    cache = pool.cache
    with pool.arena.lock:
        slots = cache.find(rows.keys)
        are_others = (cache.weights[slots] != rows.weights).any(axis=1) | (cache.state[slots] != rows.state).any(axis=1)
        are_others &= slots >= 0  # those that left the cache are among the arrivals if they come again
    rows = rows.chosen(are_others)
    left_out = len(rows.keys) - min(len(rows.keys), room)
    return rows.chosen(slice(left_out, None)), np.concatenate([stale, rows.keys[:left_out]])


def _read(pool: Pool, keys: Int64s, read: RowSource) -> _Rows:
    count = len(keys)
    weights = np.zeros((count, pool.layout.weight_words), np.uint64)
    state = np.zeros((count, pool.layout.state_words), np.uint64)
    present = np.ones(count, np.bool_)
    if count:
        read(keys, np.arange(count, dtype=np.int32), weights, state, present)
    rows = _Rows(keys, weights, state)
    return rows if present.all() else rows.chosen(present)


def changed_rows(
    pools: Sequence[Pool], is_changed: IsChanged, read: RowSource, room_bytes: int
) -> Sequence[CachedRows] | None:
    """``CachedRows.read`` of each pool, as far as there is room for all together.

    None if all that the pools hold is to be dropped: with device memory above them, of which nothing is noted; and
    where there are none yet, as nothing is noted of what comes into those that are made later.
    """
    if not pools or any(pool.hot is not None for pool in pools):
        return None
    rows = []
    for pool in pools:
        rows.append(CachedRows.read(pool, is_changed, read, room_bytes))
        room_bytes -= rows[-1].weights.nbytes + rows[-1].state.nbytes
    return rows
