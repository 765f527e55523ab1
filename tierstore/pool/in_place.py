"""Resident rows when every row has its own slot: ids give slots directly. Nothing is evicted, so nothing is pinned."""

from collections.abc import Iterator

import numpy as np

from ..cache import FullCache
from ..cache.base import CHANGED, DIRTY, LOADING, RESIDENT
from ..kernels.arrays import Int32s
from ..kernels.jit import JIT_ENABLED
from . import direct
from .arena import Arena, pool_part
from .bags import NO_INTS, Bags, Numbering, Pooling
from .in_memory import InMemory
from .leases import Leases
from .pins import Lease, Pins
from .residency import Batch, FromIds, IdsOfBags, Update
from .writeback import WriteBack


class InPlaceRows:
    def __init__(self, arena: Arena, cache: FullCache, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        self.numbering: Numbering | None = cache
        self.takes_ids = not arena.layout.is_quantized
        self._arena = arena
        self._cache = cache
        self._pins = pins
        self._leases = leases
        self._writeback = writeback

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
            self._leases.acquire(cache.keys_at(absent)).release()
        self._note_hits(len(slots) - len(absent))
        return slots

    def _note_hits(self, count: int) -> None:
        """Count lookups of rows that were in."""
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
            keys = None if update.seeds is None else row_slots + batch.bags.shifts(cache)
            groups.update(
                self._arena, 0, row_slots, update.codes, update.hyper, update.gradient, flags=flags,
                dirty=DIRTY | CHANGED, seeds=update.seeds, keys=keys,
            )  # fmt: skip

    def one_table(self, table_index: int, num_rows: int) -> InMemory | None:
        if not JIT_ENABLED or self._arena.layout.is_quantized:
            return None
        return InMemory(self._arena, self._cache, table_index, num_rows)
