"""A newer version of a store that is open for reading: made ready while lookups go on, then shown all at once.

Of the rows in the caches, those that were written since are read anew. Those that changed are kept beside the caches,
as far as the store's staging memory goes; likely next victims are left out and evicted instead. What comes in meanwhile
is noted by the pools. To show the version is then to copy rows in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ..errors import ClosedError, StoreReplacedError
from ..io import NewerVersion
from ..pool import Pool
from ..pool.arrivals import Arrivals, IsChanged
from ..pool.converting import RowSource
from .listing import resident_keys
from .manifest import Manifest
from .version import Version, unpack_tensors

if TYPE_CHECKING:
    from .store import Store

__all__ = ["CachedRows", "Newer", "changed_rows", "require_same_tables"]

_CHUNK_ROWS: Final = 1 << 15
"""Lookups wait while so many rows are compared: some milliseconds."""
_CHUNK_BYTES: Final = 8 << 20
"""Of rows that are read at a time, whether they are kept or not."""


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
        with pool.arena.fill_lock, pool.arena.lock:
            pool.filler.arrivals = Arrivals(is_changed)  # notes from here on what comes in: the list may leave that out
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
        return cls(pool, again, weights, state, np.concatenate(stale))

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.arena.fill_lock, pool.arena.lock:
            arrivals, pool.filler.arrivals = pool.filler.arrivals, None
            assert arrivals is not None, "rows came in that nobody noted"
            late = arrivals.keys(cache)
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
    """Of rows that were written, those that are others, at most ``room`` of them, and the keys of those to evict."""
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
    with pool.arena.lock:
        slots = cache.find(rows.keys)
        are_others = (cache.weights[slots] != rows.weights).any(axis=1)
        are_others |= (cache.state[slots] != rows.state).any(axis=1)
    return are_others & (slots >= 0)


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


def require_same_tables(directory: Path, shown: Manifest, newer: Manifest) -> None:
    """StoreReplacedError where a table stands in another's place: those of a replica go with the versions that brought
    them, and others may have come before anybody looked."""
    for before, after in zip(shown.tables, newer.tables, strict=False):
        if before != after:
            raise StoreReplacedError(
                f"{directory}: table {after.name!r} is in the place of {before.name!r}, which is shown; open the store "
                "again"
            )


class Newer:
    """What ``Store.find_newer`` found. It can be shown once, until it is closed or ``find_newer`` is called again.

    Attributes:
        number: of the call of ``find_newer``.
        found: the commit, in the cold tier.
        version: number, extra and tensors of the commit.
        manifest: of the store then.
        rows: what is to change in the caches; None if all that they hold is dropped.
    """

    def __init__(
        self,
        store: "Store",
        number: int,
        found: NewerVersion,
        version: Version,
        manifest: Manifest,
        rows: Sequence[CachedRows] | None,
    ) -> None:
        self._store = store
        self.number = number
        self.found = found
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
