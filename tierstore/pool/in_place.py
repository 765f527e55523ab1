"""Resident rows when every row has its own slot: ids give slots directly. Nothing is evicted, so nothing is pinned.

For small lookups, arguments are prepared once and not per call (``InPlace``): a lookup of one bag takes 5 us; by
``Lookup`` it takes 20, nearly all of it Python's.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..cache import FullCache
from ..cache.base import CHANGED, DIRTY, LOADING, RESIDENT
from ..kernels import slots as kernels
from ..kernels.arrays import Int32s, Int64s, Weights
from . import direct
from .arena import Arena, pool_part
from .bags import NO_ARG_MAX, NO_FLOATS, NO_INTS, Bags, Batch, FromIds, IdsOfBags, Pooling, Update
from .leases import Leases, ResidentRows
from .one_table import OneTable, has_one_call
from .pins import Lease, Pins
from .writeback import WriteBack

_NO_FLAGS: Final = np.empty(0, np.uint8)
_NUMPY_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}  # all that come here


class InPlace(OneTable):
    """A table in a pool where every row has a slot."""

    def __init__(self, arena: Arena, cache: FullCache, table_index: int, num_rows: int) -> None:
        super().__init__(arena, num_rows)
        self._few = direct.few(self._dim)
        firsts = cache.numbering.first_slots(np.array([table_index], np.int64))
        self._first = int(firsts[0])
        limits, starts, columns = np.array([num_rows], np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32)
        self._kept = firsts, limits, starts, columns  # by their addresses in the arguments
        self._arguments = direct.laid_out(
            starts, firsts, limits, cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, arena.weights, self._dim,
            arena.dtype_code, columns, NO_ARG_MAX, NO_INTS,
        )  # fmt: skip
        self._alone: dict[torch.dtype, direct.Split] = {}

    def _copy(self, arena: Arena, ids: Int64s, rows: Weights) -> bool:
        cache = arena.cache
        assert isinstance(cache, FullCache)
        flags = _NO_FLAGS if cache.is_complete else cache.flags
        status = kernels.copy_rows_of_ids(
            ids, self._first, self._num_rows, flags, RESIDENT | LOADING, RESIDENT, arena.weights, self._dim, rows
        )
        if status == kernels.DONE:
            cache.note_hits(len(ids))
        return status == kernels.DONE

    def _pool(self, arena: Arena, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool) -> Tensor | None:
        alone = self._alone.get(ids.dtype)
        if alone is not None and ids.numel() < self._few:
            return self._run(arena, alone, ids, offsets, mode, is_last_given)
        id_type, weight_type = _NUMPY_TYPES[ids.dtype], arena.weights.dtype.type
        how = direct.split(arena.workers, ids.numel(), self._dim, id_type, weight_type)
        if how is None:
            return None
        pooled = self._run(arena, how, ids, offsets, mode, is_last_given)
        self._alone[ids.dtype] = direct.whole(id_type, weight_type)
        return pooled

    def _run(
        self, arena: Arena, how: direct.Split, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool
    ) -> Tensor | None:
        num_ids, num_offsets, address = ids.numel(), offsets.numel(), ids.data_ptr()
        bags = num_offsets - is_last_given
        if num_ids and not address:
            return None
        pooled = torch.from_numpy(np.empty((bags, self._dim), np.float32))  # torch.empty takes twice as long
        run: Any = direct.pool_at
        cache = arena.cache
        assert isinstance(cache, FullCache)
        with arena.rows_lock:
            if arena.is_closed:
                return None
            num_flags = 0 if cache.is_complete else cache.capacity
            status = run(
                self._arguments, num_flags, address, num_ids, offsets.data_ptr(), num_offsets, bags, mode,
                pooled.data_ptr(), *how,
            )  # fmt: skip
        if status != kernels.DONE:
            return None
        with arena.lock:
            cache.note_hits(num_ids)
        return pooled


class InPlaceRows(ResidentRows):
    def __init__(self, cache: FullCache, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        super().__init__(arena, pins, leases, writeback)
        self._cache = cache
        self.numbering = cache.numbering
        self.takes_ids = not arena.layout.is_quantized

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
