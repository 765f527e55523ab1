"""Rows of a cache that evicts: a batch leases them, the whole of it or part by part."""

from collections.abc import Iterator

import numpy as np

from ..kernels.arrays import Int32s, Int64s
from .arena import Arena
from .bags import NO_INTS, Bags, Numbering, Pooling, pool_part
from .leases import Leases
from .pins import Lease, Pins
from .residency import Batch, FromIds, IdsOfBags, Update
from .writeback import WriteBack


class EvictingRows:
    numbering: Numbering | None = None
    takes_ids = False

    def __init__(self, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        self._arena = arena
        self._pins = pins
        self._leases = leases
        self._writeback = writeback

    def has_room(self, batch: Batch) -> bool:
        # The rows are counted only where it depends on them.
        return self._pins.has_room(len(batch)) or self._pins.has_room(len(batch.distinct.keys))

    def stage(self, batch: Batch) -> Lease | None:
        lease = self._leases.acquire_whole(batch.rows, batch.order) if len(batch) and self.has_room(batch) else None
        if lease is None or self._pins.hold(lease):
            return lease
        lease.release()
        return None

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        return self._leases.parts(batch.rows, batch.order) if lease is None else iter([(0, lease)])

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        count = len(batch.rows)
        if not count:
            pool_part(self._arena, self._arena.workers, batch.bags, pooling, 0, NO_INTS)
        for first, part in self.parts(batch, lease):
            with self._arena.rows_lock:
                pool_part(self._arena, self._arena.workers, batch.bags, pooling, first, part.position_slots)
            if keep and not part.held and part.num_positions == count and self._pins.hold(part):
                lease = part
        return lease

    def look_up_ids(self, ids: IdsOfBags, bags: Bags, pooling: Pooling, *, keep: bool) -> FromIds:
        raise NotImplementedError("rows are found by key")

    def held(self, slots: Int32s) -> Lease:
        raise NotImplementedError("slots are pinned by key")

    def whole(self, batch: Batch) -> Lease | None:
        return self._leases.acquire_rows(*batch.distinct) if len(batch) else None

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

    def one_table(self, table_index: int, num_rows: int) -> None:  # noqa: ARG002 - rows may not be in
        return None
