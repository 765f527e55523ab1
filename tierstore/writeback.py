"""Write-back: how newer rows of one cache reach the cold tier, between commits and for them.

A commit *freezes* the dirty rows: as they are at that moment they belong to its version. A thread then writes them down
while training goes on, and these rules keep the versions apart:

- A frozen row that is about to change is copied to the *outbox* first; the writer empties the outbox.
- Rows that became dirty after the freeze are written for the next version. Before that happens to a block, the frozen
  rows of the same block and the copies in the outbox are written for theirs, so that no block is written for an earlier
  version after it was written for a later one, and a later one holds everything the earlier one does.

Locks: ``gate`` (one write-back at a time; held over device writes), then the pool's ``lock``. A slot whose row is being
written stays pinned until it is.
"""

import threading
from typing import Any, Final

import numpy as np

from .cache import RowCache
from .io import ColdTier
from .killpoints import reach
from .rows import KEY_ROW_BITS, RowLayout

__all__ = ["MIN_OUTBOX_ROWS", "WriteBack", "outbox_bytes"]

MIN_OUTBOX_ROWS: Final = 32
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_KEY_AND_SLOT_BYTES: Final = 12
_COPIED: Final = -1
"""In place of a slot: the row is a copy, and the slot it came from is not waiting for it."""


def outbox_bytes(layout: RowLayout, rows: int) -> int:
    """What an outbox takes of which each half holds ``rows`` rows."""
    return 2 * rows * (layout.row_bytes + _KEY_AND_SLOT_BYTES)


class _Half:
    """Rows on their way down; changed under the pool's lock only, or by the writer while it is its own."""

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self.keys: Any = np.empty(capacity, np.int64)
        self.slots: Any = np.empty(capacity, np.int32)
        self.weights: Any = np.empty((capacity, layout.weight_words), np.uint64)
        self.state: Any = np.empty((capacity, layout.state_words), np.uint64)
        self.count = 0

    @property
    def room(self) -> int:
        return len(self.keys) - self.count

    def put(self, cache: RowCache, slots: Any, *, waiting: bool) -> None:
        """Copy these rows; ``waiting``: their slots are pinned until they are written."""
        part = slice(self.count, self.count + len(slots))
        self.keys[part] = cache.keys_of(slots)
        self.slots[part] = slots if waiting else _COPIED
        np.take(cache.weights, slots, axis=0, out=self.weights[part], mode="clip")
        np.take(cache.state, slots, axis=0, out=self.state[part], mode="clip")
        self.count += len(slots)

    def waiting_slots(self) -> Any:
        slots = self.slots[: self.count]
        return slots[slots != _COPIED]


class WriteBack:
    """See the module's docstring.

    Args:
        lock: the pool's.
        blocks_a_write: blocks a transaction of the cold tier may hold.
        outbox_rows: rows in each half of the outbox; one is filled while the other is written.
        epoch: the version that rows are written for.
    """

    def __init__(
        self,
        layout: RowLayout,
        cache: RowCache,
        cold: ColdTier,
        lock: threading.Condition,
        *,
        blocks_a_write: int,
        outbox_rows: int,
        epoch: int,
    ) -> None:
        self.gate = threading.RLock()
        self._layout = layout
        self._cache = cache
        self._cold = cold
        self._lock = lock
        self._blocks_a_write = blocks_a_write
        self._epoch = epoch
        self._filling, self._writing = (_Half(layout, max(outbox_rows, MIN_OUTBOX_ROWS)) for _ in range(2))
        self._error: BaseException | None = None
        self._is_busy = False

    # Updates

    def begin_update(self, slots: Any) -> None:
        """The rows of these pinned slots are about to change: keep what a version under way needs of them, mark them
        dirty. The caller holds the lock, which is released while the outbox is full."""
        first = 0
        while first < len(slots) and self._cache.num_frozen:
            room = self._filling.room
            if not room:
                self._lock.wait()
                continue
            part = slots[first : first + room]
            self._filling.put(self._cache, self._cache.thaw(part), waiting=False)
            first += len(part)
        self._cache.mark_dirty(slots)

    # Between commits

    def write_victims(self, limit: int | None = None) -> None:
        """Write up to ``limit`` dirty or frozen rows, the next victims, and with each what is newer in its block.

        The caller admits no rows meanwhile. Rows may be updated: an update marks its row dirty again, so what is
        written of it here is never the last word.
        """
        with self.gate:
            with self._lock:
                victims = self._cache.victims(self._blocks_a_write if limit is None else limit)
                slots = self._neighbours(self._cache.keys_of(victims))
            reach("write-back: rows chosen")
            if self._cache.num_frozen or self._filling.count:
                self._send(slots)
            self._write_dirty(slots)

    def write_all(self) -> None:
        """Write every dirty row; there is no version under way. The caller admits no rows meanwhile."""
        with self.gate:
            with self._lock:
                victims = self._cache.victims(self._cache.num_dirty)
                slots = victims[np.argsort(self._cache.keys_of(victims))]
            self._write_dirty(slots)

    def _neighbours(self, keys: Any) -> Any:
        """Slots of all cached rows that lie in the blocks of these rows, by key."""
        rows_per_block = self._layout.rows_per_block
        rows = keys & _ROW_MASK
        first = np.unique((keys & ~_ROW_MASK) | (rows - rows % rows_per_block))
        slots = self._cache.find((first[:, None] + np.arange(rows_per_block)).ravel())
        return slots[slots >= 0]

    def _write_dirty(self, slots: Any) -> None:
        """Write the dirty ones of these rows, ascending by key, for the version that is open."""
        cache = self._cache
        with self._lock:
            taken = cache.clean(slots)
            cache.pin(taken)
            keys = cache.keys_of(taken)
        written = 0
        try:
            for stop in self._block_bounds(keys):
                self._write(keys[written:stop], taken[written:stop], cache.weights, cache.state, self._epoch)
                written = stop
        finally:
            with self._lock:
                cache.mark_dirty(taken[written:])
                cache.unpin(taken)
                self._lock.notify_all()

    def _write(self, keys: Any, slots: Any, weights: Any, state: Any, epoch: int) -> None:
        if self._is_busy:
            raise RuntimeError("a signal handler may not write while a write-back is under way")
        self._is_busy = True
        try:
            self._cold.write(keys, slots, weights, state, epoch=epoch)
        finally:
            self._is_busy = False

    def _block_bounds(self, keys: Any) -> list[int]:
        """Ends of runs of sorted keys that lie in at most ``blocks_a_write`` blocks, no block in two runs."""
        if not len(keys):
            return []
        new_block = np.flatnonzero(np.diff(self._blocks_of(keys), prepend=-1))
        return [*new_block[self._blocks_a_write :: self._blocks_a_write].tolist(), len(keys)]

    def _blocks_of(self, keys: Any) -> Any:
        return (keys & _ROW_MASK) // self._layout.rows_per_block + (keys & ~_ROW_MASK)

    # Commits

    def freeze(self) -> None:
        """The dirty rows are what the version now open shows; from here on the next one is open. The caller holds gate
        and lock, and the version before was written or given up."""
        self._error = None
        self._cache.freeze()
        self._epoch += 1

    def write_frozen(self) -> None:
        """Write everything that belongs to the version that was frozen, in block order.

        Raises:
            what the cold tier raises; also if another thread met it. The version is then given up.
        """
        with self._lock:
            slots = self._cache.frozen_slots()
            keys = self._cache.keys_of(slots)
        order = np.argsort(keys)
        slots, blocks = slots[order], self._blocks_of(keys[order])
        first = 0
        while first < len(slots):
            stop = self._end_of_part(blocks, first)
            with self.gate:
                self._send(slots[first:stop])
            first = stop
        with self.gate:
            self._send(slots[:0])
            if self._error is not None:
                raise self._error

    def _end_of_part(self, blocks: Any, first: int) -> int:
        """Where to end a part of the rows that fits into the outbox: between two blocks, if it can be."""
        stop = first + len(self._filling.keys)
        if stop >= len(blocks):
            return len(blocks)
        start_of_block = int(np.searchsorted(blocks, blocks[stop]))
        return start_of_block if start_of_block > first else stop

    def _send(self, slots: Any) -> None:
        """Write the frozen ones of these rows and what is in the outbox. The caller holds the gate."""
        while True:
            with self._lock:
                part = slots[: self._filling.room]
                slots = slots[len(part) :]
                thawed = self._cache.thaw(part)
                self._cache.pin(thawed)
                self._filling.put(self._cache, thawed, waiting=True)
                self._filling, self._writing = self._writing, self._filling
            try:
                self._write_half(self._writing)
            except BaseException as error:
                self._error = error
                self.abandon()
                raise
            with self._lock:
                self._empty(self._writing)
            if not len(slots):
                return

    def _write_half(self, half: _Half) -> None:
        order = np.argsort(half.keys[: half.count]).astype(np.int32)
        keys = half.keys[order]
        first = 0
        for stop in self._block_bounds(keys):
            self._write(keys[first:stop], order[first:stop], half.weights, half.state, self._epoch - 1)
            first = stop

    def _empty(self, half: _Half) -> None:
        self._cache.unpin(half.waiting_slots())
        half.count = 0
        self._lock.notify_all()

    def abandon(self) -> None:
        """Give up the version that was frozen: its rows belong to the next one. A second call does nothing.

        Copies in the outbox are dropped: their rows are dirty in the cache, and newer.
        """
        with self.gate, self._lock:
            self._cache.unfreeze()
            for half in (self._filling, self._writing):
                self._cache.mark_dirty(half.waiting_slots())
                self._empty(half)

    @property
    def size_bytes(self) -> int:
        """Of the outbox."""
        return outbox_bytes(self._layout, len(self._filling.keys))
