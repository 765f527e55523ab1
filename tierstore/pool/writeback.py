"""Write-back: writes dirty rows of one cache to the cold tier, between commits and for them.

A commit *freezes* the dirty rows: their values at that moment belong to its version. A thread then writes them, some at
a time, while training continues. A frozen row that is about to change is copied to the *outbox* first; what is there is
written for the version too, after its row's slot was, if that was being written just then: the copy is the last word.
Rows that became dirty after the freeze are written for the next version, in any order with the frozen ones. Write-back
between commits writes the next victims, in the order of their last use, so that rows last used together lie together.

Locks: ``gate`` (one write-back at a time; held over device writes), then the pool's ``lock``. A slot whose row is being
written stays pinned until it is.

A write that is cut short loses nothing: a row stays dirty, or frozen, until it was written. What a commit that was cut
short leaves frozen, or in the outbox, is given up when the next one freezes rows.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from ..cache.base import Pinned, RowCache
from ..io.base import ColdTier
from ..kernels.arrays import Int32s, Int64s, Words
from ..layout import RowLayout
from ..system.killpoints import reach
from ..system.signals import Flag
from .leases import Arena, Pins

MIN_OUTBOX_ROWS: Final = 32
_VICTIMS_SHARE: Final = 1 / 8
"""Of the rows in a cache, what is written together at most: rows far from leaving may well change once more."""
_PAUSE_SECONDS: Final = 5e-5  # between two turns: a lock released and taken again at once is given to nobody else
_REST: Final = 4  # seconds that a commit rests for each second of processor time, unless somebody waits for it
_MOST_REST_SECONDS: Final = 0.25  # a first turn compiles kernels
_KEY_AND_PLACE_BYTES: Final = 12


def outbox_bytes(layout: RowLayout, rows: int) -> int:
    return rows * (layout.row_bytes + _KEY_AND_PLACE_BYTES)


def rows_a_write(layout: RowLayout, transaction_bytes: int, cached_rows: int) -> int:
    """The most rows of one write, for a cache of so many rows: whole segments, if at least one."""
    rows = min(layout.rows_within(transaction_bytes), max(1, int(cached_rows * _VICTIMS_SHARE)))
    return rows - rows % layout.rows_per_segment or rows


class _Outbox:
    """Copies of frozen rows for the version being committed; guarded by the pool's lock."""

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self.keys: Int64s = np.empty(capacity, np.int64)
        self.weights: Words = np.empty((capacity, layout.weight_words), np.uint64)
        self.state: Words = np.empty((capacity, layout.state_words), np.uint64)
        self._places: Int32s = np.arange(capacity, dtype=np.int32)
        self.count = 0

    @property
    def room(self) -> int:
        return len(self.keys) - self.count

    @property
    def places(self) -> Int32s:
        return self._places[: self.count]

    def put(self, cache: RowCache, slots: Int32s) -> None:
        """Copy the rows of these slots. A call cut short may leave a row in twice: its value is the same."""
        places = self._places[self.count : self.count + len(slots)]
        self.keys[places] = cache.keys_of(slots)
        self.weights[places] = cache.weights[slots]
        self.state[places] = cache.state[slots]
        self.count += len(slots)

    def drop(self, places: Int32s) -> None:
        is_dropped = np.zeros(len(self.keys), np.bool_)
        is_dropped[places] = True
        kept = self.places[~is_dropped[self.places]]
        all_places, count = np.concatenate([kept, places, self._places[self.count :]]), len(kept)
        self._places, self.count = all_places, count


class WriteBack:
    """``transaction_bytes``: of segments that a transaction may hold; ``epoch``: the version that rows are written for.
    ``rows_a_write``: the most that a transaction of the cold tier holds, and that a commit writes before it yields to
    others; ``waited_seconds``: how long others have waited for the writer of a commit."""

    def __init__(
        self, arena: Arena, pins: Pins, cold: ColdTier, *, transaction_bytes: int, outbox_rows: int, epoch: int
    ) -> None:
        self.gate = threading.RLock()
        self._layout, self._cache = arena.layout, arena.cache
        self._lock, self._changed = arena.lock, arena.changed
        self._pins, self._cold = pins, cold
        self.rows_a_write = rows_a_write(arena.layout, transaction_bytes, arena.cache.capacity)
        self._epoch = epoch
        self._outbox = _Outbox(arena.layout, max(outbox_rows, MIN_OUTBOX_ROWS))
        self._error: BaseException | None = None
        self._wanted = Flag()
        self._computed = 0.0  # seconds of processor time that a commit's last turn took
        self._is_busy = False
        self.waited_seconds = 0.0

    # Updates

    def begin_update(self, slots: Int32s) -> None:
        """The rows of these pinned slots are about to change: keep what a version in flight needs of them, mark them
        dirty. The caller holds the lock, which is released while the outbox is full."""
        first, cache = 0, self._cache
        while first < len(slots):
            frozen = cache.num_frozen
            room = self._outbox.room if frozen else len(slots)
            if not room:
                started = time.perf_counter()
                self._wanted.set()
                self._changed.wait()
                self.waited_seconds += time.perf_counter() - started
                first = 0  # others may have changed any of them meanwhile, and a commit may have frozen them again
                continue
            part = slots[first : first + room]
            if frozen:
                self._outbox.put(cache, cache.frozen_of(part))
            cache.mark_dirty(part)
            first += len(part)

    # Between commits

    def make_room(self) -> None:
        """Write the next victim, which is dirty or frozen, and the dirty or frozen ones soon after it.

        If every row is trained, LRU order has no clean rows behind the victim, so a transaction is filled. An order by
        count has the newest rows first, then clean ones, then rows used too often to be written now.

        Other threads may reuse slots meanwhile, so the chosen rows are remembered by key. They may also update rows: an
        update marks its row dirty again, so the value written here is never taken for the newest.
        """
        started = time.perf_counter()
        with self.gate:
            self.waited_seconds += time.perf_counter() - started
            with self._lock:
                victims = self._cache.dirty_victims(self.rows_a_write, self._layout.rows_per_segment)
                slots = self._cache.by_admission(victims)
                keys = self._cache.keys_of(slots)
            reach("write-back: rows chosen")
            if self._cache.num_frozen:
                with self._giving_up():
                    self._write_taken(slots, self._epoch - 1, frozen=True)  # a row that comes in now is not frozen
            self._write_dirty(keys)

    def write_all(self) -> None:
        """Write every dirty row; no commit is in flight, and the caller admits no rows."""
        with self.gate:
            with self._lock:
                keys = self._cache.keys_of(self._cache.by_admission(self._cache.dirty_slots()))
            self._write_dirty(keys)

    def _write_dirty(self, keys: Int64s) -> None:
        """Write the dirty ones of these rows, in their order, for the version that is open."""
        with self._lock:
            slots = self._cache.find(keys)
        self._write_taken(slots[slots >= 0], self._epoch, frozen=False)

    def _write_taken(self, slots: Int32s, epoch: int, *, frozen: bool) -> None:
        """Write the dirty or the frozen ones of these rows, and make those clean that do not change meanwhile. A frozen
        one that changes has its copy in the outbox, which is written after it. The caller holds the gate."""
        cache, pinned = self._cache, Pinned(len(slots))
        lease = self._pins.lease(pinned)
        try:
            with self._lock:
                cache.take(slots, pinned, frozen=frozen)
                taken = pinned.slots
                keys = cache.keys_of(taken)
            for part in self._write_runs(keys, taken, cache, epoch):
                with self._lock:
                    (cache.thaw if frozen else cache.settle)(taken[part])
        finally:
            lease.release()

    def _write_runs(self, keys: Int64s, slots: Int32s, rows: "RowCache | _Outbox", epoch: int) -> Iterator[slice]:
        """Write rows in transactions; yields after each which were written."""
        for first in range(0, len(keys), self.rows_a_write):
            if self._is_busy:
                raise RuntimeError("a signal handler may not write while a write-back is in flight")
            part = slice(first, first + self.rows_a_write)
            try:
                self._is_busy = True
                self._cold.write(keys[part], slots[part], rows.weights, rows.state, epoch=epoch)
            finally:
                self._is_busy = False
            yield part

    # Commits

    def freeze(self, epoch: int, wanted: Flag) -> None:
        """Freeze the dirty rows for the version before ``epoch``, for which rows are written from now on. The caller
        holds gate and lock, and the version before was written or given up. ``wanted``: set once somebody waits."""
        self.abandon()
        self._error, self._wanted, self._computed = None, wanted, 0.0
        self._epoch = epoch
        self._cache.freeze()

    def write_frozen(self) -> None:
        """Write all rows of the frozen version; other writers may run in between. Raises the cold tier's errors, also
        those that another thread met; the version is then given up."""
        with self._lock:
            slots = self._cache.by_admission(self._cache.frozen_slots())
        for first in range(0, len(slots), self.rows_a_write):
            part = slots[first : first + self.rows_a_write]
            self._take_turn(partial(self._write_taken, part, self._epoch - 1, frozen=True))
            while self._outbox.count > len(self._outbox.keys) // 2:
                self._take_turn(self._write_some_copies)
        while self._outbox.count:
            self._take_turn(self._write_some_copies)
        if self._error is not None:
            raise self._error

    def _take_turn(self, write: Callable[[], None]) -> None:
        self._wanted.wait(min(_REST * self._computed, _MOST_REST_SECONDS))
        started = time.thread_time()
        with self.gate, self._giving_up():
            write()
        self._computed = time.thread_time() - started
        time.sleep(_PAUSE_SECONDS)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the version up if part of it cannot be written."""
        try:
            yield
        except BaseException as error:
            self._error = error
            self.abandon()
            raise

    def _write_some_copies(self) -> None:
        """Write one turn's worth of the outbox, and forget it. The caller holds the gate."""
        outbox = self._outbox
        with self._lock:
            places = outbox.places[: self.rows_a_write]
            first = np.unique(outbox.keys[places], return_index=True)[1]
            chosen = places[np.sort(first)]
        for _ in self._write_runs(outbox.keys[chosen], chosen, outbox, self._epoch - 1):
            pass
        with self._lock:
            outbox.drop(places)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Give up the frozen version: its rows belong to the next one. A second call does nothing.

        Copies in the outbox are dropped: their rows are dirty in the cache, and newer.
        """
        with self.gate, self._lock:
            self._cache.unfreeze()
            self._outbox.count = 0
            self._changed.notify_all()

    @property
    def size_bytes(self) -> int:
        return outbox_bytes(self._layout, len(self._outbox.keys))
