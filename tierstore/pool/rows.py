"""Lookups and updates of the rows of batches, which are fetched first: rows that may be evicted, and rows that each
have a slot of their own, so that ids give slots directly and nothing is pinned."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from ..cache.base import CHANGED, DIRTY, LOADING, RESIDENT
from ..cache.ddr import DdrCache
from ..cache.full import FullCache
from ..kernels.arrays import Int32s, Int64s
from . import direct
from .arena import Arena, pool_part
from .backward import Update
from .bags import NO_INTS, Bags, Batch, FromIds, IdsOfBags, Numbering, Pooling
from .leases import Leases
from .one_table import InCache, InPlace, OneTable, has_one_call
from .pins import Lease, Pins
from .writeback import WriteBack


class ResidentRows(ABC):
    """Brings in, looks up and updates the rows of a batch. A lease that is given is of the whole batch, or None. Slots
    are of ``numbering``, which batches have here; without one they have keys. Methods raise ClosedError if the pool
    was closed, and DamagedError if a row on SSD failed its check."""

    numbering: Numbering | None = None
    takes_ids = False

    def __init__(self, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        self._arena = arena
        self._pins = pins
        self._leases = leases
        self._writeback = writeback

    @property
    def are_all_in(self) -> bool:
        """Whether every row is in, to stay."""
        return False

    @abstractmethod
    def has_room(self, batch: Batch) -> bool:
        """Whether the rows could be held, with those that are."""

    @abstractmethod
    def stage(self, batch: Batch) -> Lease | None:
        """Bring the rows in and hold them; None, and nothing is read, if there is no room."""

    @abstractmethod
    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        """(first position, lease): parts of the batch, in order. A lease is over when the next is asked for."""

    def look_up_ids(self, ids: IdsOfBags, bags: Bags, pooling: Pooling, *, keep: bool) -> FromIds:
        """Check ids and pool every bag, in one pass, if it ``takes_ids``; ``keep`` asks for slots."""
        raise NotImplementedError("rows are found by key")

    def held(self, slots: Int32s) -> Lease:
        """A held lease of rows that ``look_up_ids`` gave the slots of."""
        raise NotImplementedError("slots are pinned by key")

    @abstractmethod
    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        """Pool every bag. Returns the lease; with ``keep``, one that is held, if there is room."""

    @abstractmethod
    def whole(self, batch: Batch) -> Lease | None:
        """A lease of all rows of the batch, for ``update``; None if they do not fit, or there are none."""

    @abstractmethod
    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        """Merge each row's gradients in their fixed order, mark it dirty, update it. Without a lease, if a later part
        of a split batch cannot be fetched, the rows of earlier parts are updated."""

    @abstractmethod
    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """A short way for small lookups of a table, if there is one."""


class EvictingRows(ResidentRows):
    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        is_ours = isinstance(self._arena.cache, DdrCache) and has_one_call(self._arena)
        return InCache(self._arena, self._leases, table_index, num_rows) if is_ours else None

    def has_room(self, batch: Batch) -> bool:
        return self._pins.has_room(len(batch.distinct.keys))

    def stage(self, batch: Batch) -> Lease | None:
        lease = self._leases.acquire_batch(batch) if len(batch) and self.has_room(batch) else None
        if lease is None or self._pins.hold(lease):
            return lease
        lease.release()
        return None

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        return self._leases.parts(batch.rows, batch) if lease is None else iter([(0, lease)])

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        count = len(batch.rows)
        if not count:
            pool_part(self._arena, self._arena.workers, batch.bags, pooling, 0, NO_INTS)
        parts = self._leases.parts(batch.rows, batch) if lease is None else ((0, lease),)
        for first, part in parts:
            with self._arena.rows_lock:
                pool_part(self._arena, self._arena.workers, batch.bags, pooling, first, part.position_slots)
            if keep and not part.held and part.num_positions == count and self._pins.hold(part):
                lease = part
        return lease

    def whole(self, batch: Batch) -> Lease | None:
        # Rows used last first: they are the likeliest to be still resident.
        return self._leases.acquire_rows(batch.distinct, slice(None, None, -1)) if len(batch) else None

    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        if lease is None:
            inverse, keys = batch.distinct
        else:
            assert lease.inverse is not None, "slots of this cache are not the positions' own"
            inverse, keys = lease.inverse, np.empty(len(lease.slots), np.int64)
            if update.seeds is not None:
                keys[inverse] = batch.rows
        groups = update.groups
        groups.by_number(inverse, len(keys))
        for first, slots in self._row_parts(keys, lease):
            with self._arena.lock:
                self._writeback.begin_update(slots)
                row_keys = None if update.seeds is None else keys[first:]
                groups.update(self._arena, first, slots, update.codes, update.hyper, update.gradient,
                              seeds=update.seeds, keys=row_keys)  # fmt: skip

    def _row_parts(self, keys: Int64s, lease: Lease | None) -> Iterator[tuple[int, Int32s]]:
        """(first number, int32 slot of each from there on): parts of the rows, pinned. Rows used last come first: they
        are the likeliest to be still resident."""
        if lease is not None:
            yield 0, lease.slots
            return
        for passed, part in self._leases.parts(keys[::-1].copy()):
            yield len(keys) - passed - len(part.slots), part.slots[::-1].copy()


class InPlaceRows(ResidentRows):
    def __init__(self, cache: FullCache, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        super().__init__(arena, pins, leases, writeback)
        self._cache = cache
        self.numbering = cache.numbering
        self.takes_ids = not arena.layout.is_quantized

    @property
    def are_all_in(self) -> bool:
        return self._cache.is_complete

    def has_room(self, batch: Batch) -> bool:  # noqa: ARG002 - each row has its slot
        return True

    def stage(self, batch: Batch) -> Lease | None:
        return self.held(self._bring_in(batch))

    def held(self, slots: Int32s) -> Lease:
        """A lease that marks an in-flight batch; no pin does."""
        lease = self._pins.in_place(slots)
        self._pins.hold(lease)
        return lease

    def _bring_in(self, batch: Batch) -> Int32s:
        """int32 [N]: the slot of each position, its row in. It stays in."""
        cache = self._cache
        slots: Int32s = batch.rows
        self._arena.require_open()
        absent = NO_INTS if cache.are_in(slots) else cache.absent(slots)
        if len(absent):
            self._leases.acquire(cache.numbering.keys_at(absent)).release()
        self._note_hits(len(slots) - len(absent))
        return slots

    def _note_hits(self, count: int) -> None:
        with self._arena.lock:
            self._cache.note_hits(count)

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        return iter([(0, self._pins.in_place(self._bring_in(batch)) if lease is None else lease)])

    def look_up_ids(self, ids: IdsOfBags, bags: Bags, pooling: Pooling, *, keep: bool) -> FromIds:
        arena, cache = self._arena, self._cache
        slots = np.empty(int(bags.starts[-1]), np.int32) if keep else NO_INTS
        with arena.rows_lock:
            arena.require_open()
            flags = cache.flags[:0] if cache.is_complete else cache.flags
            failed = direct.look_up(
                arena.workers, arena.layout.dim, ids.ids, ids[1:], flags, RESIDENT | LOADING, RESIDENT, bags.scale,
                pooling.mode, arena.weights, arena.layout.dim, arena.dtype_code, bags.columns, pooling.out,
                pooling.arg_max, slots,
            )  # fmt: skip
            if not failed:
                self._note_hits(int(bags.starts[-1]))
        return FromIds(slots, failed)

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        slots = self._bring_in(batch) if lease is None else lease.slots
        with self._arena.rows_lock:
            pool_part(self._arena, self._arena.workers, batch.bags, pooling, 0, slots)
        return self.held(slots) if keep and lease is None else lease

    def whole(self, batch: Batch) -> Lease:
        return self._pins.in_place(self._bring_in(batch))

    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        cache, groups = self._cache, update.groups
        slots = self._bring_in(batch) if lease is None else lease.slots
        with self._arena.lock:
            self._arena.require_open()
            row_slots = groups.by_slot(slots, cache.number)
            flags = cache.flags
            if cache.num_frozen:
                self._writeback.begin_update(groups.used(row_slots))
                flags = flags[:0]
            keys = None if update.seeds is None else row_slots + batch.bags.shifts(cache.numbering)
            groups.update(
                self._arena, 0, row_slots, update.codes, update.hyper, update.gradient, flags=flags,
                dirty=DIRTY | CHANGED, seeds=update.seeds, keys=keys,
            )  # fmt: skip

    def one_table(self, table_index: int, num_rows: int) -> InPlace | None:
        return InPlace(self._arena, self._cache, table_index, num_rows) if has_one_call(self._arena) else None
