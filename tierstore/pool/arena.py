"""The rows of one cache as kernels read them, the locks over them, and the end of their use."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache import RowCache
from ..errors import ClosedError
from ..kernels.arrays import Floats, Weights
from ..kernels.floats import FLOAT32, half_code
from ..kernels.threads import Workers
from ..rows import RowLayout
from ..system.forks import disown_in_forks


@dataclass(eq=False)
class RowArrays:
    """Rows as kernels read and update them.

    Attributes:
        half: ``floats.half_code`` of the rows' dtype.
        weights: float32, uint16 or uint8 [capacity, >= stored columns]; state: float32 [capacity, >= state_dim].
    """

    layout: RowLayout
    half: int
    weights: Weights
    state: Floats

    @classmethod
    def plain(cls, weights: Floats) -> "RowArrays":
        """float32 [n, dim] without state."""
        return RowArrays(RowLayout(dim=weights.shape[1]), FLOAT32, weights, np.zeros((len(weights), 0), np.float32))


class Arena(RowArrays):
    """See the module's docstring.

    Attributes:
        fill_lock, lock, rows_lock: see ``pool.pool``.
        changed: the condition of ``lock``: slots were released, or the outbox has room, or the pool was closed.
        is_disowned: this is a forked process, which may not use the rows.
    """

    def __init__(self, layout: RowLayout, cache: RowCache, workers: Workers, *, readonly: bool) -> None:
        super().__init__(
            layout, half_code(layout.dtype), cache.weights.view(layout.numpy_dtype), cache.state.view(np.float32)
        )
        self.cache = cache
        self.workers = workers
        self.is_closed = self.is_disowned = False
        self._make_locks(readonly=readonly)
        disown_in_forks(self)

    def _make_locks(self, *, readonly: bool) -> None:
        self.fill_lock = threading.RLock()
        # An exception can come when a Condition, which is Python, has its lock and has not told; not so with the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.rows_lock: Any = contextlib.nullcontext() if readonly else self.lock

    def disown(self) -> None:
        """Refuse further use in a forked process. A thread that held one of these locks, or the lock of numba's
        compiler, at the fork does not exist here to release it."""
        self._make_locks(readonly=False)
        self.is_closed = self.is_disowned = True

    def refuse(self) -> None:
        """Refuse further use; waiters are told."""
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()

    def require_open(self) -> None:
        """ClosedError after ``refuse``."""
        if self.is_closed:
            raise ClosedError("the store is closed")

    def over_threads(self, work: Callable[[int, int], Any], count: int) -> None:
        """Have threads do ``work(begin, end)`` of ranges that cover ``count``."""
        self.workers.share(work, np.arange(count + 1))
