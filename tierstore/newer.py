"""A newer version of a store that is open for reading: made ready while lookups go on, then shown all at once.

Of the rows in the caches, those whose blocks changed are read anew, beside the caches, as far as the store's staging
memory goes; likely next victims are left out and evicted instead. What comes in meanwhile is noted by the pools. To
show the version is then to copy rows in memory.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from .converting import RowSource
from .manifest import Manifest
from .pool import Pool
from .version import Version, unpack_tensors

if TYPE_CHECKING:
    from .store import Store

__all__ = ["CachedRows", "Newer"]


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
        cache = pool.cache
        with pool.fill_lock, pool.lock:
            pool.arrivals = []
            keys = cache.keys_of(cache.resident_slots())
        changed = keys[is_changed(keys)]
        count = min(len(changed), room_bytes // pool.layout.row_bytes)
        stale, again = changed[: len(changed) - count], changed[len(changed) - count :]
        weights = np.zeros((count, pool.layout.weight_words), np.uint64)
        state = np.zeros((count, pool.layout.state_words), np.uint64)
        present = np.empty(count, np.bool_)
        read(again, np.arange(count, dtype=np.int32), weights, state, present)
        if not present.all():  # rows that the newer version, after a rollback, has not
            stale = np.concatenate([stale, again[~present]])
            again, weights, state = again[present], weights[present], state[present]
        return cls(pool, again, weights, state, stale, is_changed)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.fill_lock, pool.lock:
            arrivals, pool.arrivals = pool.arrivals, None
            late = np.concatenate([self.keys[:0], *(arrivals or [])])
            late = late[self.is_changed(late)]
            gone = cache.find(np.unique(np.concatenate([self.stale, late[~np.isin(late, self.keys)]])))
            cache.evict(gone[gone >= 0])
            slots = cache.find(self.keys)
            here = slots >= 0
            cache.weights[slots[here]] = self.weights[here]
            cache.state[slots[here]] = self.state[here]

    @property
    def size_bytes(self) -> int:
        return int(self.weights.nbytes + self.state.nbytes)


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
