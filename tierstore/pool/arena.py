"""The rows of one cache as kernels read and pool them, the locks over them, and the end of their use."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.base import RowCache
from ..errors import ClosedError
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Weights
from ..kernels.floats import FLOAT32, code_of_dtype
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..system.processes import disown_in_forks
from .joined import Bags


@dataclass(eq=False)
class RowArrays:
    """Rows as kernels read and update them: float32, uint16 or uint8 [capacity, >= stored columns], and state, float32
    [capacity, >= state_dim]."""

    layout: RowLayout
    dtype_code: int
    weights: Weights
    state: Floats

    @classmethod
    def plain(cls, weights: Floats) -> "RowArrays":
        """float32 [n, dim] without state."""
        return RowArrays(RowLayout(dim=weights.shape[1]), FLOAT32, weights, np.zeros((len(weights), 0), np.float32))


class Arena(RowArrays):
    """A cache's rows. ``changed`` is the condition of ``lock``: slots were released, the outbox has room, or the pool
    was closed. ``is_disowned``: this is a forked process, which may not use the rows."""

    def __init__(self, layout: RowLayout, cache: RowCache, workers: Workers, *, readonly: bool) -> None:
        super().__init__(
            layout, code_of_dtype(layout.dtype), cache.weights.view(layout.numpy_dtype), cache.state.view(np.float32)
        )
        self.cache = cache
        self.workers = workers
        self.is_closed = self.is_disowned = False
        self._make_locks(readonly=readonly)
        disown_in_forks(self)

    def _make_locks(self, *, readonly: bool) -> None:
        self.fill_lock = threading.RLock()
        # An exception can come when a Condition, which is Python, has its lock and woke nobody; not so with the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.rows_lock: Any = contextlib.nullcontext() if readonly else self.lock

    def disown(self) -> None:
        """Refuse further use in a forked process. A thread that held one of these locks, or the lock of numba's
        compiler, at the fork does not exist here to release it."""
        self._make_locks(readonly=False)
        self.is_closed = self.is_disowned = True

    def refuse(self) -> None:
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()

    def require_open(self) -> None:
        """ClosedError after ``refuse``."""
        if self.is_closed:
            raise ClosedError("the store is closed")


def pool_part(
    rows: RowArrays, workers: Workers, bags: Bags, mode: int, out: Floats, arg_max: Int32s, first: int, slots: Int32s
) -> None:
    """Pool the positions from ``first`` on, whose slots are given, into ``out``, float32 [batch, columns], and of
    maxima the positions into ``arg_max``, int32 [bags, dim]. The caller holds the lock over the rows, if any."""
    pool_rows: Any = quantized.pool_rows if rows.layout.is_quantized else kernels.pool_rows

    def work(begin: int, end: int) -> None:
        pool_rows(
            begin, end, first, first + len(slots), bags.starts, slots, bags.scale, mode, rows.weights, rows.layout.dim,
            rows.dtype_code, bags.columns, bags.batch, out, arg_max,
        )  # fmt: skip

    workers.share(work, bags.starts)


def dot_part(rows: RowArrays, bags: Bags, grad_out: Floats, first: int, slots: Int32s, grad_scale: Floats) -> None:
    """Gradients of the weights of the positions from ``first`` on, given ``grad_out``, float32 [batch, columns], added
    to ``grad_scale``, float32 [N]; see ``pool_part``."""
    dot_rows: Any = quantized.dot_rows if rows.layout.is_quantized else kernels.dot_rows
    dot_rows(
        0, len(bags.starts) - 1, first, first + len(slots), bags.starts, slots, rows.weights, rows.layout.dim,
        rows.dtype_code, bags.columns, bags.batch, grad_out, grad_scale,
    )  # fmt: skip
