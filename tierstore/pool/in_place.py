"""Resident rows when every row has its own slot: ids give slots directly. Nothing is evicted, so nothing is pinned.

For small lookups, arguments are prepared once and not per call (``InPlace``): a lookup of one bag takes 4 us; by
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
from ..kernels.slots import DONE
from . import direct
from .arena import Arena, pool_part
from .bags import NO_ARG_MAX, NO_FLOATS, NO_INTS, Bags, Batch, FromIds, IdsOfBags, Pooling, Update
from .leases import Leases, ResidentRows
from .one_table import COLUMN, OneTable, has_one_call
from .pins import Lease, Pins
from .writeback import WriteBack

_NO_FLAGS: Final = np.empty(0, np.uint8)
_NUMPY_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}  # all that come here


class InPlace(OneTable):
    """A table in a pool where every row has a slot."""

    def __init__(self, arena: Arena, cache: FullCache, table_index: int, num_rows: int) -> None:
        super().__init__(arena, num_rows)
        self._few = direct.few(arena.workers, self._dim)
        self._first = int(cache.numbering.first_slots(np.array([table_index], np.int64))[0])
        # By their addresses in the arguments; others are the arena's, which whoever looks up keeps.
        self._kept = np.zeros(1, np.int64), np.array([self._first], np.int64), np.array([num_rows], np.int64)
        self._arguments: dict[torch.dtype, Int64s] = {}

    def _lay_out(self, arena: Arena, id_type: torch.dtype) -> Int64s:
        cache, body = arena.cache, direct.body_address(_NUMPY_TYPES[id_type], arena.weights.dtype.type)
        assert isinstance(cache, FullCache)
        arguments: Int64s = direct.laid_out(
            *self._kept, cache.tallies, cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, arena.weights, self._dim,
            arena.dtype_code, COLUMN, NO_ARG_MAX, NO_INTS, body, arena.workers.threads,
        )  # fmt: skip
        self._arguments[id_type] = arguments
        return arguments

    def _copy(self, arena: Arena, ids: Int64s, rows: Weights) -> bool:
        cache = arena.cache
        assert isinstance(cache, FullCache)
        flags = _NO_FLAGS if cache.is_complete else cache.flags
        status = kernels.copy_rows_of_ids(
            ids, self._first, self._num_rows, flags, RESIDENT | LOADING, RESIDENT, arena.weights, self._dim, rows
        )
        if status == DONE:
            cache.note_hits(len(ids))
        return status == DONE

    def _pool(self, arena: Arena, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool) -> Tensor | None:
        arguments = self._arguments.get(ids.dtype)
        if arguments is None:
            arguments = self._lay_out(arena, ids.dtype)
        num_ids, num_offsets, address, start = ids.numel(), offsets.numel(), ids.data_ptr(), offsets.data_ptr()
        team = 0 if num_ids < self._few else arena.workers.native_team()
        if not start or (num_ids and not address) or (num_ids >= self._few and not team):
            return None
        bags = num_offsets - is_last_given
        pooled = torch.from_numpy(np.empty((bags, self._dim), np.float32))  # torch.empty takes twice as long
        run: Any = direct.pool_at
        with arena.rows_lock:
            if arena.is_closed:
                return None
            status = run(arguments, address, num_ids, start, num_offsets, bags, mode, pooled.data_ptr(), team)
        return pooled if status == DONE else None


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
