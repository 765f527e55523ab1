"""Following a writer: a newer version is made ready while lookups go on, then shown all at once."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import ClosedError, DamagedError
from ..io import ColdTier, NewerVersion
from ..system.signals import shielded
from .catalog import Catalog
from .changed import CachedRows, changed_rows, rehearse
from .lifetime import Lifetime
from .manifest import Manifest
from .pools import Pools
from .shown import Shown
from .version import Version, unpack, unpack_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Newer:
    """What ``Store.find_newer`` found. It can be shown once, until it is closed or ``find_newer`` is called again."""

    _follower: "Follower"
    found: NewerVersion
    """The commit, in the cold tier."""
    version: Version
    """Its number, extra and tensors."""
    manifest: Manifest
    """Of the store then."""
    rows: Sequence[CachedRows] | None
    """What is to change in the caches; None if all that they hold is dropped."""

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self.version)

    def show(self) -> int:
        """Have the store show this version from now on; returns its number.

        Lookups in other threads may go on: one that this meets is made again, and shows the newer version.

        Raises:
            TableError: a prefetched batch, or one whose backward is to come, holds rows. Nothing changed.
            ClosedError: it was shown or closed, ``find_newer`` was called again, or the store is closed.
        """
        return self._follower.show(self)

    def close(self) -> None:
        """Give it up, if it was not shown: the pages that it keeps from being reused are free. Again is fine."""
        self._follower.give_up(self.found)


class Follower:
    """Moves a store open for reading to newer versions."""

    def __init__(self, lifetime: Lifetime, cold: ColdTier, catalog: Catalog, pools: Pools, shown: Shown) -> None:
        self.lock = threading.RLock()
        """Held while a version is made ready or shown, and the store is closed. Taken before that of the pools."""
        self._shown = shown
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
        self._catalog.drop_prepared()
        while True:
            try:
                self._found = found = self._cold.find_newer()
            except DamagedError:
                if not self._catalog.prepare(self._catalog.version)[1]:
                    raise
                continue  # it had rows of a table that has become larger
            if found is None:
                return None
            version = unpack(found.version, found.payload)
            manifest, are_new = self._catalog.prepare(version)
            if not are_new:  # else what was found lacks the rows of a new table, or of a larger one
                break
        version.require_of(manifest)
        rows = None
        if self._catalog.has_tables_of(manifest):
            read = self._catalog.source(found.read)
            rows = changed_rows(list(self._pools), found.changed, read, self._pools.reserved_bytes)
        return Newer(self, found, version, manifest, rows)

    @shielded
    def rehearse(self) -> None:
        with self.lock:
            self._lifetime.require_open()
            self.give_up(self._found)
            self._found = self._cold.find_newer()
            self.give_up(self._found)
            self._pools.require_unused("rehearse")
            for pool in self._pools:
                if not pool.tier.on_device:
                    rehearse(pool, self._catalog.source(self._cold.read))

    def give_up(self, found: NewerVersion | None) -> None:
        """Drop what was made ready, if it is still there."""
        if self._lifetime.is_over:
            return
        with self.lock:
            if found is not None and found is self._found:
                self._found = None
                found.close()

    @shielded
    def show(self, newer: Newer) -> int:
        with contextlib.ExitStack() as held:
            for lock in (self.lock, self._shown.changing(), self._pools.lock):
                held.enter_context(lock)
            self._lifetime.require_open()
            if newer.found is not self._found:
                raise ClosedError(
                    f"version {newer.version.number} was shown or given up, or find_newer was called again; show what "
                    "the last call gave"
                )
            for rows in newer.rows or ():  # no row of the version before comes in, or is pinned, from here on
                held.enter_context(rows.pool.arena.fill_lock)
            self._pools.require_unused("move to a newer version")
            try:
                for rows in newer.rows or ():
                    rows.show()
                newer.found.show()
            except BaseException:
                self._pools.close()
                raise
            finally:
                self.give_up(newer.found)
            if newer.rows is None:
                self._pools.close()
            self._catalog.move(newer.manifest, newer.version)
            return newer.version.number
