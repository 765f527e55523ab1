"""Fast small lookups in a table where every row has its own slot: arguments are prepared once, not per call.

A lookup of one bag takes 5 us; by ``Lookup`` it takes 20, nearly all of it Python's.
"""

import os
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..cache import FullCache
from ..cache.base import LOADING, RESIDENT
from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import FLOAT32
from . import direct
from .arena import Arena
from .bags import NO_ARG_MAX, NO_FLOATS, NO_INTS

_NO_FLAGS: Final = np.empty(0, np.uint8)
_NUMPY_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}


class InMemory:
    """A table in a pool where every row has a slot. The pool is not kept alive.

    Args:
        arena: the pool's rows.
        cache: the pool's.
        table_index: which table.
        num_rows: of it.
    """

    def __init__(self, arena: Arena, cache: FullCache, table_index: int, num_rows: int) -> None:
        self._arena = weakref.ref(arena)
        self._process_id = os.getpid()
        self._dim = arena.layout.dim
        self._few = direct.few(self._dim)
        firsts = cache.first_slots(np.array([table_index], np.int64))
        self._range = int(firsts[0]), num_rows
        limits, starts, columns = np.array([num_rows], np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32)
        self._kept = firsts, limits, starts, columns  # by their addresses in the arguments
        self._arguments = direct.laid_out(
            starts, firsts, limits, cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, arena.weights, self._dim,
            arena.dtype_code, columns, NO_ARG_MAX, NO_INTS,
        )  # fmt: skip
        self._alone: dict[torch.dtype, direct.Split] = {}

    @property
    def is_over(self) -> bool:
        """Whether the pool was closed, as when a new table brought a new one."""
        arena = self._arena()
        return arena is None or arena.is_closed

    def rows(self, ids: Int64s) -> Floats | None:
        """float32 [n, dim], the rows of these ids; None if one is no row or not resident."""
        arena = self._arena()
        if arena is None or os.getpid() != self._process_id:
            return None
        cache, weights = arena.cache, arena.weights
        assert isinstance(cache, FullCache)
        rows = np.empty((len(ids), self._dim), weights.dtype)
        with arena.lock:
            if arena.is_closed:
                return None
            flags = _NO_FLAGS if cache.is_complete else cache.flags
            status = kernels.copy_rows_of_ids(
                ids, *self._range, flags, RESIDENT | LOADING, RESIDENT, weights, self._dim, rows
            )
            if status != kernels.DONE:
                return None
            cache.note_hits(len(ids))
        if arena.dtype_code == FLOAT32:
            return rows
        return torch.from_numpy(rows).view(arena.layout.torch_dtype).float().numpy()

    def pooled(self, ids: Tensor, offsets: Tensor, mode: int) -> Tensor | None:
        """As ``Table.pooled``; None where that must do it: a row is not resident, or an argument is wrong or not a
        plain tensor in memory.

        Args:
            mode: ``kernels.SUM`` or ``kernels.MEAN``.
        """
        arena = self._arena()
        if not (
            arena is not None
            and os.getpid() == self._process_id  # else this is a fork, without the store's threads
            and type(ids) is Tensor
            and type(offsets) is Tensor
            and ids.is_cpu
            and offsets.is_cpu
            and offsets.dtype is torch.int64
            and ids.dim() == offsets.dim() == 1
            and ids.is_contiguous()
            and offsets.is_contiguous()
            and offsets.data_ptr()
        ):
            return None
        alone = self._alone.get(ids.dtype)
        if alone is not None and ids.numel() < self._few:
            return self._run(arena, alone, ids, offsets, mode)
        id_type, weight_type = _NUMPY_TYPES.get(ids.dtype), arena.weights.dtype.type
        if id_type is None:
            return None
        how = direct.split(arena.workers, ids.numel(), self._dim, id_type, weight_type)
        if how is None:
            return None
        pooled = self._run(arena, how, ids, offsets, mode)
        self._alone[ids.dtype] = direct.whole(id_type, weight_type)
        return pooled

    def _run(self, arena: Arena, how: direct.Split, ids: Tensor, offsets: Tensor, mode: int) -> Tensor | None:
        num_ids, bags, address = ids.numel(), offsets.numel() - 1, ids.data_ptr()
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
                self._arguments, num_flags, address, num_ids, offsets.data_ptr(), bags, mode, pooled.data_ptr(), *how
            )
        if status != kernels.DONE:
            return None
        with arena.lock:
            cache.note_hits(num_ids)
        return pooled
