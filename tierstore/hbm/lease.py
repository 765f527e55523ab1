"""Pinned rows in device memory."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.arrays import Int32s
from .grouping import Grouping
from .lanes import Mark

if TYPE_CHECKING:
    from .pool import HbmPool


class HbmLease:
    """The rows of a batch, pinned in their slots until ``release``.

    Attributes:
        slots: int32 [N]; the first U are rows of the arenas, in order of the keys asked for, the others are -1.
        num_rows: U.
        grouping: of those keys.
        overflow: numpy int32 [n], which overflow slots are among them.
        ready: when the rows are in place.
        held: whether it outlives the call that took it.
        last_use: when the work that uses the rows is done.
        changed: whether that work makes the rows newer than those below.
    """

    __slots__ = ("_pool", "changed", "grouping", "held", "last_use", "num_rows", "overflow", "ready", "slots")

    def __init__(
        self, pool: "HbmPool", grouping: Grouping, slots: Tensor, num_rows: int, overflow: Int32s, ready: Mark
    ) -> None:
        self._pool: HbmPool | None = pool
        self.grouping = grouping
        self.slots = slots
        self.num_rows = num_rows
        self.overflow = overflow
        self.ready = ready
        self.held = False
        self.last_use = ready
        self.changed = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """See ``DeviceLease``."""
        assert self._pool is not None, "rows are used after their release"
        with self._pool.rows_lock:
            self._pool.lane.follow(self.ready)
            try:
                yield
            finally:
                self.last_use = self._pool.lane.mark()

    def release(self, *, changed: bool = False) -> None:
        """Nobody will use the rows any more, beside the work that does by now; a second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.changed = changed
            pool.released.append(self)

    def __del__(self) -> None:
        # In any thread, under any lock: ``release`` neither waits nor asks which stream is current.
        self.release()
