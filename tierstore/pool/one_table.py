"""Small lookups of one table, by as few calls of compiled code as can be: most of their time is Python's.

They give None where a ``Lookup`` must do it: a row is not in, or, of those that may be evicted and are fetched to be
pooled, there is no room for all; or an argument is wrong or not a plain tensor there.
"""

import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..cache.base import LOADING, RESIDENT
from ..cache.full import FullCache
from ..errors import ClosedError
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s
from ..kernels.floats import FLOAT32
from ..layout import KEY_ROW_BITS
from ..system.signals import shielded
from . import direct
from .joined import NO_ARG_MAX, NO_FLOATS, NO_INTS
from .leases import Arena, Leases

_COLUMN: Final = np.zeros(1, np.int32)
_ID_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}


class OneTable:
    """A table of a pool, which is not kept alive. Where every row has a slot, one call checks, finds and pools;
    else one call finds the rows and notes their use, another pools them."""

    def __init__(self, arena: Arena, leases: Leases, table_index: int, num_rows: int) -> None:
        self._arena, self._leases = weakref.ref(arena), weakref.ref(leases)
        self._dim, self._few = arena.layout.dim, direct.few(arena.workers, arena.layout.dim)
        self._num_rows, self._table_key = num_rows, table_index << KEY_ROW_BITS
        # Where every row has a slot: what stays between calls, and arrays whose addresses are in it.
        self._arguments: dict[torch.dtype, Int64s] = {}
        self._kept: Any = None
        if isinstance(arena.cache, FullCache):
            first = arena.cache.numbering.first_slots(np.array([table_index], np.int64))
            self._kept = np.zeros(1, np.int64), first, np.array([num_rows], np.int64)

    @property
    def is_over(self) -> bool:
        """Whether the pool was closed, as when a new table brought a new one."""
        arena = self._arena()
        return arena is None or arena.is_closed

    def rows(self, ids: Int64s) -> Floats | None:
        """float32 [n, dim], the rows of these ids."""
        arena, keys = self._arena(), self._keys(ids)
        if arena is None or keys is None:
            return None
        rows = np.empty((len(ids), self._dim), arena.weights.dtype)
        with arena.lock:
            slots = None if arena.is_closed else arena.cache.use(keys)
            if slots is None:
                return None
            kernels.copy_rows_out(slots, arena.weights, self._dim, rows)
        is_float32 = arena.dtype_code == FLOAT32
        return rows if is_float32 else torch.from_numpy(rows).view(arena.layout.torch_dtype).float().numpy()

    def pooled(self, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool) -> Tensor | None:
        """As ``Table.pooled``, of mode ``kernels.SUM`` or ``MEAN``."""
        arena = self._arena()
        if not (
            arena is not None
            and not arena.is_closed  # as it is in forks, too
            and type(ids) is type(offsets) is Tensor
            and ids.is_cpu
            and offsets.is_cpu
            and ids.dtype in _ID_TYPES
            and offsets.dtype is torch.int64
            and ids.dim() == offsets.dim() == 1
            and ids.is_contiguous()
            and offsets.is_contiguous()
            and offsets.data_ptr()
        ):
            return None
        pool = self._pool_from_cache if self._kept is None else self._pool_in_place
        return pool(arena, ids, offsets, offsets.numel() - is_last_given, mode)

    def _pool_in_place(self, arena: Arena, ids: Tensor, offsets: Tensor, bags: int, mode: int) -> Tensor | None:
        num_ids, address = ids.numel(), ids.data_ptr()
        team = 0 if num_ids < self._few else arena.workers.native_team()
        if (num_ids and not address) or (num_ids >= self._few and not team):
            return None
        given = self._arguments.get(ids.dtype)
        if given is None:
            cache: Any = arena.cache
            lay_out: Any = direct.laid_out
            given = self._arguments[ids.dtype] = lay_out(
                *self._kept, cache.tallies, cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, arena.weights,
                self._dim, arena.dtype_code, _COLUMN, NO_ARG_MAX, NO_INTS,
                direct.body_address(_ID_TYPES[ids.dtype], arena.weights.dtype.type), arena.workers.threads,
            )  # fmt: skip
        pooled = torch.from_numpy(np.empty((bags, self._dim), np.float32))  # torch.empty takes twice as long
        run: Any = direct.pool_at
        with arena.rows_lock:
            if arena.is_closed:
                return None
            status = run(
                given, address, num_ids, offsets.data_ptr(), offsets.numel(), bags, mode, pooled.data_ptr(), team
            )
        return pooled if status == kernels.DONE else None

    def _keys(self, ids: Any) -> Int64s | None:
        keys = np.empty(len(ids), np.int64)
        return keys if kernels.row_keys(ids, 0, self._num_rows, self._table_key, keys) < 0 else None

    def _pool_from_cache(self, arena: Arena, ids: Tensor, offsets: Tensor, bags: int, mode: int) -> Tensor | None:
        if ids.numel() >= self._few or (keys := self._keys(ids.numpy())) is None:
            return None
        starts = np.full(bags + 1, len(keys), np.int64)
        starts[: offsets.numel()] = offsets.numpy()
        if not kernels.copy_offsets(starts, len(keys), starts):
            return None
        with arena.lock:
            slots = None if arena.is_closed else arena.cache.use(keys)
            if slots is not None:
                return self._add(arena, starts, slots, mode)
        return self._bring_in(arena, keys, starts, mode)

    def _add(self, arena: Arena, starts: Int64s, slots: Int32s, mode: int) -> Tensor:
        bags = len(starts) - 1
        pooled = np.empty((bags, self._dim), np.float32)
        kernels.pool_rows(
            0, bags, 0, len(slots), starts, slots, NO_FLOATS, mode, arena.weights, self._dim, arena.dtype_code,
            _COLUMN, bags, pooled, NO_ARG_MAX,
        )  # fmt: skip
        return torch.from_numpy(pooled)

    @shielded
    def _bring_in(self, arena: Arena, keys: Int64s, starts: Int64s, mode: int) -> Tensor | None:
        """None if there was no room for all rows. DamagedError as of ``Leases.whole``."""
        leases = self._leases()
        try:
            lease = None if leases is None else leases.whole(keys)
        except ClosedError:  # a ``Lookup`` finds the pool that came after
            return None
        if lease is None:
            return None
        with arena.rows_lock:
            pooled = self._add(arena, starts, lease.position_slots, mode)
        lease.release()
        return pooled
