"""A newer version of a store that is open for reading: made ready while lookups go on, then shown all at once.

Of the rows in the caches, those whose blocks changed are read anew, and those that are others kept beside the caches,
as far as the store's staging memory goes; likely next victims are left out and evicted instead. What comes in meanwhile
is noted by the pools. To show the version is then to copy rows in memory.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from .converting import RowSource
from .manifest import Manifest
from .pool import Pool
from .version import Version, unpack_tensors

if TYPE_CHECKING:
    from .store import Store

__all__ = ["CachedRows", "Newer"]

_CHUNK_ROWS: Final = 1 << 15
"""Lookups wait while so many rows are compared: some milliseconds."""


class CachedRows(NamedTuple):
    """The rows in one pool's cache that are others in the newer version.

    Attributes:
        keys: int64 [n], those that were read anew.
        weights, state: uint64 [n, words], as they are in the newer version.
        stale: int64, keys of the others, to be evicted.
        is_changed: whether rows (int64 keys) are others in the newer version.
    """

    pool: Pool
    keys: Any
    weights: Any
    state: Any
    stale: Any
    is_changed: Callable[[Any], Any]

    @classmethod
    def read(cls, pool: Pool, is_changed: Callable[[Any], Any], read: RowSource, room_bytes: int) -> "CachedRows":
        """Find and read them.

        Args:
            read: reads rows of the newer version.
            room_bytes: for the rows read.
        """
        with pool.fill_lock, pool.lock:
            pool.arrivals = []
            slots = pool.cache.resident_slots()
            keys: Any = None if pool.full else pool.cache.keys_of(slots)
        if pool.full:  # whose slots are never another row's: lookups need not wait
            keys = pool.full.keys_at(slots)
        room = room_bytes // pool.layout.row_bytes
        parts, stale = [_read(pool, keys[:0], read)], [keys[:0]]
        # The last first: what there is no room for are then likely next victims.
        for stop in range(len(keys), 0, -_CHUNK_ROWS):
            chunk = keys[max(0, stop - _CHUNK_ROWS) : stop]
            part, gone = _read_changed(pool, chunk[is_changed(chunk)], read, room)
            room -= len(part.keys)
            parts.append(part)
            stale.append(gone)
        again, weights, state = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls(pool, again, weights, state, np.concatenate(stale), is_changed)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.fill_lock, pool.lock:
            arrivals, pool.arrivals = pool.arrivals, None
            late = np.concatenate([self.keys[:0], *(arrivals or [])])
            late = late[self.is_changed(late)] if len(late) else late
            late = late[~np.isin(late, self.keys)] if len(late) else late
            gone = cache.find(np.unique(np.concatenate([self.stale, late])))
            cache.evict(gone[gone >= 0])
            slots = cache.find(self.keys)
            here = slots >= 0
            cache.weights[slots[here]] = self.weights[here]
            cache.state[slots[here]] = self.state[here]

    @property
    def size_bytes(self) -> int:
        return int(self.weights.nbytes + self.state.nbytes)


class _Rows(NamedTuple):
    keys: Any
    weights: Any
    state: Any

    def chosen(self, which: Any) -> "_Rows":
        return _Rows(self.keys[which], self.weights[which], self.state[which])


def _read_changed(pool: Pool, keys: Any, read: RowSource, room: int) -> tuple[_Rows, Any]:
    """Of rows in changed blocks, those that are others, at most ``room`` of them, and the keys of those to evict."""
    if not room:
        return _read(pool, keys[:0], read), keys
    rows = _read(pool, keys, read)
    stale = keys[~np.isin(keys, rows.keys)]  # after a rollback the newer version may not have them
    rows = rows.chosen(_are_others(pool, rows))
    left_out = len(rows.keys) - min(len(rows.keys), room)
    return rows.chosen(slice(left_out, None)), np.concatenate([stale, rows.keys[:left_out]])


def _read(pool: Pool, keys: Any, read: RowSource) -> _Rows:
    count = len(keys)
    weights = np.zeros((count, pool.layout.weight_words), np.uint64)
    state = np.zeros((count, pool.layout.state_words), np.uint64)
    present = np.ones(count, np.bool_)
    if count:
        read(keys, np.arange(count, dtype=np.int32), weights, state, present)
    rows = _Rows(keys, weights, state)
    return rows if present.all() else rows.chosen(present)


def _are_others(pool: Pool, rows: _Rows) -> Any:
    """bool [n]: which differ from those in the cache, to the bit. Those that have left it do not: if they come again
    they are among the arrivals."""
    cache = pool.cache
    with pool.lock:
        slots = cache.find(rows.keys)
        are_others = (cache.weights[slots] != rows.weights).any(axis=1)
        are_others |= (cache.state[slots] != rows.state).any(axis=1)
    return are_others & (slots >= 0)


class Newer:
    """What ``Store.find_newer`` found.

    Attributes:
        version: number, extra and tensors of the commit.
        manifest: of the store then.
        rows: what is to change in the caches; None if all that they hold is dropped.
    """

    def __init__(self, store: "Store", version: Version, manifest: Manifest, rows: Sequence[CachedRows] | None) -> None:
        self._store = store
        self.version = version
        self.manifest = manifest
        self.rows = rows

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self.version)

    def show(self) -> int:
        """Have the store show this version from now on; returns its number.

        No lookup may be under way in the store: whoever calls this sees to it.

        Raises:
            TableError: a prefetched batch, or one whose backward is to come, holds rows. Nothing changed.
            ClosedError.
        """
        return self._store.show_newer(self)

    def close(self) -> None:
        """Give it up."""
        for rows in self.rows or ():
            rows.pool.arrivals = None
