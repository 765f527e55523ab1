"""Pinned rows in device memory."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.arrays import Int32s
from .cache import Grouping
from .lanes import Mark

if TYPE_CHECKING:
    from .pool import HbmPool


class HbmLease:
    """The rows of a batch, pinned in their slots until ``release``; in place from ``ready`` on. ``grouping`` is of the
    keys asked for."""

    __slots__ = ("__weakref__", "_pool", "claim", "grouping", "held", "num_rows", "overflow", "ready", "slots")

    def __init__(
        self, pool: "HbmPool", grouping: Grouping, slots: Tensor, num_rows: int, overflow: Int32s, ready: Mark
    ) -> None:
        self._pool: HbmPool | None = pool
        self.grouping = grouping
        self.ready = ready
        self.held = False
        self.claim = HbmClaim(self, pool.released.append)
        self.slots = self.claim.slots = slots
        self.num_rows = num_rows
        self.overflow = self.claim.overflow = overflow
        self.claim.last_use = ready
        self.claim.changed = False

    @contextlib.contextmanager
    def in_use(self, *, changes: bool = False) -> Iterator[None]:
        assert self._pool is not None, "rows are used after their release"
        with self._pool.rows_lock:
            self._pool.lane.follow(self.ready)
            self.claim.changed |= changes
            try:
                yield
            finally:
                self.claim.last_use = self._pool.lane.mark()

    def release(self, *, changed: bool = False) -> None:
        """Nobody will use the rows any more, beside the work that does by now; a second call does nothing."""
        self.claim.changed |= changed
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.released.append(self.claim)


class HbmClaim(weakref.ref[HbmLease]):
    """What a lease has, for when it is gone. Nothing of Python runs where one is dropped: the garbage collector may do
    that in any thread, under any lock, and no exception can come then.

    Attributes:
        slots: int32 [N]; the first ones are rows of the arenas, in order of the keys asked for, the others are -1.
        overflow: numpy int32 [n], which overflow slots are among them.
        last_use: when the work that uses the rows is done.
        changed: whether that work makes the rows newer than those below.
    """

    __slots__ = ("changed", "last_use", "overflow", "slots")
    slots: Tensor
    overflow: Int32s
    last_use: Mark
    changed: bool
