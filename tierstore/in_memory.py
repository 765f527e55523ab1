"""Lookups in a table whose rows all have slots of their own: what each call needs, made ready once.

A lookup of a bag by ``Lookup`` takes 20 us, nearly all of it Python's; this takes 4.
"""

from typing import TYPE_CHECKING, Any, Final, Optional

import numpy as np
import torch
from torch import Tensor

from . import direct, kernels
from ._jit import JIT_ENABLED
from .cache import FullCache
from .cache.admission import LOADING, RESIDENT
from .lookup import NO_ARG_MAX, NO_FLOATS
from .pool import Pool
from .signals import Shield

if TYPE_CHECKING:
    from .table import Table

__all__ = ["InMemory"]

_NUMPY_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}


class InMemory:
    """A table in a pool where every row has a slot.

    Args:
        table: it.
        cache: the pool's.

    Attributes:
        pool: the pool.
    """

    def __init__(self, table: "Table", pool: Pool, cache: FullCache) -> None:
        self.pool = pool
        self._cache = cache
        self._dim = pool.layout.dim
        first, num_rows = cache.first_slot(table.index), table.config.num_embeddings
        self._plan = np.zeros(1, np.int64), np.array([first], np.int64), np.array([num_rows], np.int64)
        self._column = np.zeros(1, np.int32)
        self._no_flags = cache.flags[:0]
        self._few = direct.few(self._dim)
        self._runs: dict[torch.dtype, Any] = {}

    @classmethod
    def of(cls, table: "Table") -> Optional["InMemory"]:
        """None if its pool is another kind."""
        pool = table.pool
        if not JIT_ENABLED or pool.full is None or pool.hot is not None or pool.layout.is_quantized:
            return None
        return cls(table, pool, pool.full)

    def pooled(self, ids: Tensor, offsets: Tensor, mode: int) -> Tensor | None:
        """As ``Table.pooled``, or None if that must do it: for rows not in, and arguments that are wrong or not plain
        tensors in memory.

        Args:
            mode: ``kernels.SUM`` or ``kernels.MEAN``.
        """
        if not (
            isinstance(ids, Tensor)
            and isinstance(offsets, Tensor)
            and ids.is_cpu
            and offsets.is_cpu
            and offsets.dtype is torch.int64
            and ids.dim() == offsets.dim() == 1
            and ids.is_contiguous()
            and offsets.is_contiguous()
        ):
            return None
        run = self._runs.get(ids.dtype)
        if run is not None and ids.numel() < self._few and offsets.numel():
            return self._run(run, direct.WHOLE, ids, offsets, mode)
        id_type = _NUMPY_TYPES.get(ids.dtype)
        if id_type is None or not offsets.numel():
            return None
        with Shield():  # while it is compiled
            how = direct.split(self.pool.workers, ids.numel(), self._dim, id_type, self.pool.weights.dtype.type)
            if how.parts > 1 and not how.team:
                return None
            run = direct.look_up_at(id_type)
            pooled = self._run(run, how, ids, offsets, mode)
        if how.parts == 1:
            self._runs[ids.dtype] = run
        return pooled

    def _run(self, run: Any, how: direct.Split, ids: Tensor, offsets: Tensor, mode: int) -> Tensor | None:
        pool, cache = self.pool, self._cache
        num_ids, bags = ids.numel(), offsets.numel() - 1
        pooled = np.empty((bags, self._dim), np.float32)
        with pool.rows_lock:
            pool.require_open()
            status = run(
                ids.data_ptr(), num_ids, offsets.data_ptr(), bags, *how, *self._plan,
                self._no_flags if cache.is_complete else cache.flags, RESIDENT | LOADING, RESIDENT, NO_FLOATS, mode,
                pool.weights, self._dim, pool.half, self._column, pooled, NO_ARG_MAX,
            )  # fmt: skip
        if status != kernels.DONE:
            return None
        pool.note_hits(num_ids)
        return torch.from_numpy(pooled)
