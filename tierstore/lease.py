"""Rows of a pool in use: pinned in an evicting cache, counted in one that keeps every row."""

from typing import TYPE_CHECKING, Any

from .cache import Admission

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["Lease", "Use"]


class Lease:
    """The rows of the first ``consumed`` positions of a batch, pinned in their slots until ``release``."""

    __slots__ = ("_admission", "_pool", "held")

    def __init__(self, pool: "Pool", admission: Admission) -> None:
        self._pool: Pool | None = pool
        self._admission = admission
        self.held = False

    @property
    def consumed(self) -> int:
        return self._admission.consumed

    @property
    def num_unique(self) -> int:
        return self._admission.num_unique

    @property
    def inverse(self) -> Any:
        """int32 [consumed]: unique number of each position."""
        return self._admission.inverse[: self._admission.consumed]

    @property
    def slots(self) -> Any:
        """int32 [num_unique]."""
        return self._admission.slots

    @property
    def active(self) -> bool:
        """Whether the rows are still pinned."""
        return self._pool is not None

    def release(self) -> None:
        """Unpin the rows; a second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release(self._admission.slots, self.held)

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.release_later(self._admission.slots, self.held)


class Use:
    """A batch between its lookup and its backward, or prefetched, in a full cache, where no pin tells of it. Dropped,
    it is over."""

    __slots__ = ("__weakref__", "_pool")

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        with pool.lock:
            pool.uses.add(self)

    def release(self) -> None:
        """The batch is done; a second call does nothing."""
        self._pool.uses.discard(self)
