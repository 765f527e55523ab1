"""A newer version of a store that is open for reading: made ready while lookups go on, then shown all at once.

Of the rows in the caches, those whose blocks changed are read anew, beside the caches, as far as the store's staging
memory goes; likely next victims are left out and evicted instead. What comes in meanwhile is noted by the pools. To
show the version is then to copy rows in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from .cache import RowCache
from .converting import RowSource
from .errors import ClosedError
from .manifest import Manifest
from .pool import Pool
from .version import Version, unpack_tensors

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Arrivals", "CachedRows", "Newer", "changed_rows"]

IsChanged = Callable[[Any], Any]
"""Whether rows (int64 keys) are others in the newer version: bool [n]."""
_STEP: Final = 1 << 20
_MAX_ARRIVALS: Final = 1 << 16


class Arrivals:
    """Rows that came into a cache from the version it shows, and are others in the newer one.

    If they become too many to be noted, they are found by a look at the whole cache.
    """

    def __init__(self, is_changed: IsChanged) -> None:
        self._is_changed = is_changed
        self._parts: list[Any] | None = []
        self._count = 0

    def add(self, keys: Any) -> None:
        """Note those of ``keys`` that are others."""
        if self._parts is None:
            return
        changed = keys[self._is_changed(keys)]
        self._count += len(changed)
        if self._count > _MAX_ARRIVALS:
            self._parts = None
        elif len(changed):
            self._parts.append(changed)

    def keys(self, cache: RowCache) -> Any:
        """int64: all of them, and maybe others that changed."""
        return _changed_keys(cache, self._is_changed) if self._parts is None else _joined(self._parts)


def _joined(parts: Iterable[Any]) -> Any:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _changed_keys(cache: RowCache, is_changed: IsChanged) -> Any:
    """Of the rows in a cache, in the order of ``resident_slots``."""
    return _changed_of(cache.keys_of(cache.resident_slots()), is_changed)


def _changed_of(keys: Any, is_changed: IsChanged) -> Any:
    """Those that are others, found some at a time."""
    parts = (keys[first : first + _STEP] for first in range(0, len(keys), _STEP))
    return _joined(part[is_changed(part)] for part in parts)


class CachedRows(NamedTuple):
    """The rows in one pool's cache that are others in the newer version.

    Attributes:
        keys: int64 [n], those that were read anew.
        weights, state: uint64 [n, words], as they are in the newer version.
        stale: int64, keys of the others, to be evicted.
    """

    pool: Pool
    keys: Any
    weights: Any
    state: Any
    stale: Any

    @classmethod
    def read(cls, pool: Pool, is_changed: IsChanged, read: RowSource, room_bytes: int) -> "CachedRows":
        """Find and read them.

        Args:
            read: reads rows of the newer version.
            room_bytes: for the rows read.
        """
        cache = pool.cache
        with pool.fill_lock, pool.lock:
            pool.arrivals = Arrivals(is_changed)
            keys = cache.keys_of(cache.resident_slots())
        changed = _changed_of(keys, is_changed)
        del keys
        count = min(len(changed), room_bytes // pool.layout.row_bytes)
        stale, again = changed[: len(changed) - count], changed[len(changed) - count :]
        weights = np.zeros((count, pool.layout.weight_words), np.uint64)
        state = np.zeros((count, pool.layout.state_words), np.uint64)
        present = np.empty(count, np.bool_)
        read(again, np.arange(count, dtype=np.int32), weights, state, present)
        if not present.all():  # rows that the newer version, after a rollback, has not
            stale = np.concatenate([stale, again[~present]])
            again, weights, state = again[present], weights[present], state[present]
        return cls(pool, again, weights, state, stale)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.fill_lock, pool.lock:
            arrivals, pool.arrivals = pool.arrivals, None
            assert arrivals is not None, "rows came in that nobody noted"
            late = arrivals.keys(cache)
            gone = cache.find(np.unique(np.concatenate([self.stale, late[~np.isin(late, self.keys)]])))
            cache.evict(gone[gone >= 0])
            slots = cache.find(self.keys)
            here = slots >= 0
            cache.weights[slots[here]] = self.weights[here]
            cache.state[slots[here]] = self.state[here]

    @property
    def size_bytes(self) -> int:
        return int(self.weights.nbytes + self.state.nbytes)


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
        room_bytes -= rows[-1].size_bytes
    return rows


class Newer:
    """What ``Store.find_newer`` found. It can be shown once, until it is closed or ``find_newer`` is called again.

    Attributes:
        number: of the call of ``find_newer``.
        version: number, extra and tensors of the commit.
        manifest: of the store then.
        rows: what is to change in the caches; None if all that they hold is dropped.
    """

    def __init__(
        self, store: "Store", number: int, version: Version, manifest: Manifest, rows: Sequence[CachedRows] | None
    ) -> None:
        self._store = store
        self.number = number
        self.version = version
        self.manifest = manifest
        self.rows = rows

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self.version)

    def require_of(self, number: int) -> None:
        """ClosedError unless it is what the call of ``find_newer`` with this number gave."""
        if self.number != number:
            raise ClosedError(
                f"version {self.version.number} was shown or given up, or find_newer was called again; show what the "
                "last call gave"
            )

    def show(self) -> int:
        """Have the store show this version from now on; returns its number.

        No lookup may be under way in the store: whoever calls this sees to it.

        Raises:
            TableError: a prefetched batch, or one whose backward is to come, holds rows. Nothing changed.
            ClosedError: it was shown or closed, ``find_newer`` was called again, or the store is closed.
        """
        return self._store.show_newer(self)

    def close(self) -> None:
        """Give it up, if it was not shown: the pages that it keeps from being reused are free. Again is fine."""
        self._store.give_up_newer(self.number)
