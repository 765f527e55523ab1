"""Refresh of a reader: a newer version is made ready while lookups go on, then shown all at once."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from ..cache.base import Listing
from ..errors import ClosedError, DamagedError
from ..io.base import ColdTier, NewerVersion
from ..kernels.arrays import Int64s, Words
from ..pool.converting import RowSource
from ..pool.pool import Pool
from ..system.signals import shielded
from .catalog import Catalog
from .lifetime import Lifetime
from .manifest import Manifest
from .pools import Pools
from .version import Version, unpack, unpack_tensors

_PIECE_ROWS: Final = 1 << 14  # lookups wait while so many are listed, or looked for: a millisecond or two
_PAUSE_SECONDS: Final = 1e-4  # long enough for a waiting thread to wake up and take the lock, which is not kept for it
_CHUNK_BYTES: Final = 8 << 20  # of rows that are read at a time


def resident_keys(pool: Pool) -> Int64s:
    """Keys of the rows in a pool's cache, int64 [n], each once, likely next victims first. Rows that come or leave
    meanwhile may be listed, and the order is a hint: the lock is free between pieces."""
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


class CachedRows(NamedTuple):
    """What changes in one pool's cache: read into the memory that write staging has in a store open for writing, then
    copied into the cache. Rows that do not fit, likely next victims, are evicted when the version is shown."""

    pool: Pool
    changed: Int64s  # int64 [n]: keys of all rows that may be others in the newer version
    keys: Int64s  # int64 [m], of those that were read
    weights: Words
    state: Words  # uint64 [m, words], as they are in the newer version

    @classmethod
    def read(cls, pool: Pool, changed: Int64s, read: RowSource, free_bytes: int) -> "CachedRows":
        """``read`` those that are cached, of the newer version, as far as they fit ``free_bytes``."""
        layout, parts = pool.layout, [changed[:0]]
        for first in range(0, len(changed), _PIECE_ROWS):
            part = changed[first : first + _PIECE_ROWS]
            with pool.arena.lock:
                parts.append(part[pool.cache.find(part) >= 0])
        cached, most = np.concatenate(parts), free_bytes // layout.row_bytes
        if len(cached) > most:
            listed = resident_keys(pool)  # likely next victims first
            cached = listed[np.isin(listed, cached)][-most:] if most else cached[:0]
        weights = np.zeros((len(cached), layout.weight_words), np.uint64)
        state = np.zeros((len(cached), layout.state_words), np.uint64)
        present, step = np.ones(len(cached), np.bool_), max(1, _CHUNK_BYTES // layout.row_bytes)
        for begin in range(0, len(cached), step):
            own = slice(begin, begin + step)
            slots = np.arange(len(cached[own]), dtype=np.int32)
            read(cached[own], slots, weights[own], state[own], present[own])
        if not present.all():  # after a rollback the newer version may not have them
            cached, weights, state = cached[present], weights[present], state[present]
        return cls(pool, changed, cached, weights, state)

    def show(self) -> None:
        """Put them into the cache. No row of the pool is in use."""
        pool, cache = self.pool, self.pool.cache
        with pool.arena.fill_lock, pool.arena.lock:
            is_here = (slots := cache.find(self.keys)) >= 0
            slots = slots[is_here]
            cache.weights[slots] = self.weights[is_here]
            cache.state[slots] = self.state[is_here]
            others = cache.find(self.changed)
            cache.evict(np.setdiff1d(others[others >= 0], slots))


@dataclass(frozen=True, slots=True, eq=False)
class Newer:
    """What ``Store.find_newer`` found. It can be shown once, until it is closed or ``find_newer`` is called again."""

    _follower: "Follower"
    found: NewerVersion  # the commit, in the cold tier
    version: Version  # its number, extra and tensors
    manifest: Manifest  # of the store then
    rows: Sequence[CachedRows] | None  # what is to change in the caches; None if all that they hold is dropped
    show_ids: Sequence[Callable[[], None]]  # of the tables with dynamic ids

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self.version)

    def show(self) -> int:
        """Have the store show this version from now on; returns its number. Lookups in other threads may go on: one
        that this meets is made again, and shows the newer version. TableError, nothing changed: an in-flight batch
        holds rows. ClosedError: it was shown or closed, ``find_newer`` was called again, or the store is closed."""
        return self._follower.show(self)

    def close(self) -> None:
        """Give it up, if it was not shown; its pages may be reused then. Again is fine."""
        self._follower.give_up(self.found)


class Follower:
    def __init__(self, lifetime: Lifetime, cold: ColdTier, catalog: Catalog, pools: Pools) -> None:
        self.lock = threading.RLock()
        """Held while a version is made ready or shown, and the store is closed. Taken before that of the pools."""
        self._lifetime = lifetime
        self._cold = cold
        self._catalog = catalog
        self._pools = pools
        self._found: NewerVersion | None = None  # by the last call of find, and neither shown nor given up

    @shielded
    def find(self) -> Newer | None:
        with self.lock:
            self._lifetime.require_open()
            self.give_up(self._found)
            try:
                return self._find()
            except BaseException:
                self.give_up(self._found)
                raise

    def _find(self) -> Newer | None:
        catalog = self._catalog
        catalog.enter(catalog.manifest.shapes)  # without the tables of what was found before
        while True:
            try:
                self._found = found = self._cold.find_newer()
            except DamagedError:
                if not catalog.prepare(catalog.version)[1]:
                    raise
                continue  # it had rows of a table that has become larger
            if found is None:
                return None
            version = unpack(found.version, found.payload)
            manifest, are_new = catalog.prepare(version)
            if not are_new:  # else what was found lacks the rows of a new table, or of a larger one
                break
        version.require_of(manifest)
        pools, rows = list(self._pools), None
        # With device memory above them, caches are dropped whole; and pools that are not there yet may come meanwhile.
        if manifest.tables == catalog.manifest.tables and pools and not any(pool.tier.on_device for pool in pools):
            read, free_bytes, rows = catalog.source(found.read), self._pools.reserved_bytes, list[CachedRows]()
            for pool in pools:
                rows.append(CachedRows.read(pool, found.changed, read, free_bytes))
                free_bytes -= rows[-1].weights.nbytes + rows[-1].state.nbytes
        return Newer(self, found, version, manifest, rows, [each.changed(found) for each in catalog.ids])

    @shielded
    def rehearse(self) -> None:
        """Reads a cached row again, of the version that is shown, and lists some."""
        with self.lock:
            self._lifetime.require_open()
            self.give_up(self._found)
            self._found = self._cold.find_newer()
            self.give_up(self._found)
            self._pools.require_unused("rehearse")
            for ids in self._catalog.ids:
                ids.rehearse()
            for pool in self._pools:
                if not pool.tier.on_device:
                    with pool.arena.lock:
                        pool.cache.list_more(Listing(), 1)
                        keys = pool.cache.keys_of(pool.cache.resident_slots()[-1:])
                    rows = CachedRows.read(pool, keys, self._catalog.source(self._cold.read), pool.layout.row_bytes)
                    rows._replace(changed=keys[:0]).show()  # a row that was never written stays, too

    def give_up(self, found: NewerVersion | None) -> None:
        if self._lifetime.is_over:
            return
        with self.lock:
            if found is not None and found is self._found:
                self._found = None
                found.close()

    @shielded
    def show(self, newer: Newer) -> int:
        catalog, pools = self._catalog, self._pools
        with self.lock, catalog.shown.changing(), catalog.ids_locked(), pools.lock, contextlib.ExitStack() as held:
            self._lifetime.require_open()
            if newer.found is not self._found:
                raise ClosedError(
                    f"version {newer.version.number} was shown or given up, or find_newer was called again; show what "
                    "the last call gave"
                )
            for rows in newer.rows or ():  # no row of the version before comes in, or is pinned, from here on
                held.enter_context(rows.pool.arena.fill_lock)
            pools.require_unused("move to a newer version")
            try:
                for rows in newer.rows or ():
                    rows.show()
                newer.found.show()
                for show in newer.show_ids:
                    show()
            except BaseException:
                pools.close()
                for ids in catalog.ids:
                    ids.forget()
                raise
            finally:
                self.give_up(newer.found)
            if newer.rows is None:
                pools.close()
            catalog.move(newer.manifest, newer.version)
            return newer.version.number
