"""Small lookups of one table, by as few calls of compiled code as can be: most of their time is Python's.

They give None where a ``Lookup`` must do it: a row is not in, or, of those that may be evicted and are fetched to be
pooled, there is no room for all; or an argument is wrong or not a plain tensor there.
"""

import weakref
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..cache.base import LOADING, RESIDENT
from ..cache.full import FullCache
from ..errors import ClosedError
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s, Weights
from ..kernels.floats import FLOAT32
from ..kernels.jit import JIT_ENABLED
from ..layout import KEY_ROW_BITS
from ..system.signals import shielded
from . import direct
from .arena import Arena
from .joined import NO_ARG_MAX, NO_FLOATS, NO_INTS
from .leases import Leases

_COLUMN: Final = np.zeros(1, np.int32)
_NO_FLAGS: Final = np.empty(0, np.uint8)
_ID_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}


def has_one_call(arena: Arena) -> bool:
    """Whether tables of these rows have such lookups."""
    return JIT_ENABLED and not arena.layout.is_quantized


class OneTable(ABC):
    """A table of a pool, which is not kept alive."""

    def __init__(self, arena: Arena, num_rows: int) -> None:
        self._arena = weakref.ref(arena)
        self._dim = arena.layout.dim
        self._num_rows = num_rows
        self._few = direct.few(arena.workers, self._dim)

    @property
    def is_over(self) -> bool:
        """Whether the pool was closed, as when a new table brought a new one."""
        arena = self._arena()
        return arena is None or arena.is_closed

    def rows(self, ids: Int64s) -> Floats | None:
        """float32 [n, dim], the rows of these ids."""
        arena = self._arena()
        if arena is None:
            return None
        rows = np.empty((len(ids), self._dim), arena.weights.dtype)
        with arena.lock:
            if arena.is_closed or not self._copy(arena, ids, rows):
                return None
        if arena.dtype_code == FLOAT32:
            return rows
        return torch.from_numpy(rows).view(arena.layout.torch_dtype).float().numpy()

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
        ):
            return None
        return self._pool(arena, ids, offsets, mode, is_last_given)

    @abstractmethod
    def _copy(self, arena: Arena, ids: Int64s, rows: Weights) -> bool:
        """Copy rows out, unless one is not in. The caller holds the lock."""

    @abstractmethod
    def _pool(
        self, arena: Arena, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool
    ) -> Tensor | None: ...  # fmt: skip


class InCache(OneTable):
    """A table in a pool whose rows may be evicted: one call finds them and notes their use, another pools them."""

    def __init__(self, arena: Arena, leases: Leases, table_index: int, num_rows: int) -> None:
        super().__init__(arena, num_rows)
        self._leases = weakref.ref(leases)
        self._table_key = table_index << KEY_ROW_BITS

    def _keys(self, ids: Any) -> Int64s | None:
        keys = np.empty(len(ids), np.int64)
        return keys if kernels.row_keys(ids, 0, self._num_rows, self._table_key, keys) < 0 else None

    def _copy(self, arena: Arena, ids: Int64s, rows: Weights) -> bool:
        cache: Any = arena.cache
        keys = self._keys(ids)
        slots = None if keys is None else cache.use(keys)
        if slots is not None:
            kernels.copy_rows_out(slots, arena.weights, self._dim, rows)
        return slots is not None

    def _pool(self, arena: Arena, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool) -> Tensor | None:
        num_ids, bags, cache = ids.numel(), offsets.numel() - is_last_given, arena.cache
        keys = self._keys(ids.numpy()) if num_ids < self._few and offsets.data_ptr() else None
        if keys is None:
            return None
        starts = np.full(bags + 1, num_ids, np.int64)
        starts[: offsets.numel()] = offsets.numpy()
        if not kernels.copy_offsets(starts, num_ids, starts):
            return None
        pooled = np.empty((bags, self._dim), np.float32)
        with arena.lock:
            slots = None if arena.is_closed else cache.use(keys)
            if slots is not None:
                self._add(arena, starts, slots, mode, pooled)
        if slots is None and not self._bring_in(arena, keys, starts, mode, pooled):
            return None
        return torch.from_numpy(pooled)

    def _add(self, arena: Arena, starts: Int64s, slots: Int32s, mode: int, pooled: Floats) -> None:
        kernels.pool_rows(
            0, len(pooled), 0, len(slots), starts, slots, NO_FLOATS, mode, arena.weights, self._dim, arena.dtype_code,
            _COLUMN, len(pooled), pooled, NO_ARG_MAX,
        )  # fmt: skip

    @shielded
    def _bring_in(self, arena: Arena, keys: Int64s, starts: Int64s, mode: int, pooled: Floats) -> bool:
        """Whether there was room for all rows. DamagedError as of ``Leases.whole``."""
        leases = self._leases()
        try:
            lease = None if leases is None else leases.whole(keys)
        except ClosedError:  # a ``Lookup`` finds the pool that came after
            return False
        if lease is None:
            return False
        with arena.rows_lock:
            self._add(arena, starts, lease.position_slots, mode, pooled)
        lease.release()
        return True


class InPlace(OneTable):
    """A table in a pool where every row has a slot. Its arguments are prepared once: a lookup of one bag takes 4 us; by
    ``Lookup`` it takes 20, nearly all of it Python's."""

    def __init__(self, arena: Arena, cache: FullCache, table_index: int, num_rows: int) -> None:
        super().__init__(arena, num_rows)
        self._first = int(cache.numbering.first_slots(np.array([table_index], np.int64))[0])
        # By their addresses in the arguments; others are the arena's, which the caller keeps alive.
        self._kept = np.zeros(1, np.int64), np.array([self._first], np.int64), np.array([num_rows], np.int64)
        self._arguments: dict[torch.dtype, Int64s] = {}

    def _lay_out(self, arena: Arena, id_type: torch.dtype) -> Int64s:
        cache: Any = arena.cache
        body = direct.body_address(_ID_TYPES[id_type], arena.weights.dtype.type)
        arguments: Int64s = direct.laid_out(
            *self._kept, cache.tallies, cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, arena.weights, self._dim,
            arena.dtype_code, _COLUMN, NO_ARG_MAX, NO_INTS, body, arena.workers.threads,
        )  # fmt: skip
        self._arguments[id_type] = arguments
        return arguments

    def _copy(self, arena: Arena, ids: Int64s, rows: Weights) -> bool:
        cache: Any = arena.cache
        flags = _NO_FLAGS if cache.is_complete else cache.flags
        status = kernels.copy_rows_of_ids(
            ids, self._first, self._num_rows, flags, RESIDENT | LOADING, RESIDENT, arena.weights, self._dim, rows
        )
        if status == kernels.DONE:
            cache.note_hits(len(ids))
        return status == kernels.DONE

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
        return pooled if status == kernels.DONE else None
