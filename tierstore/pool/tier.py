"""The contract of a pool's tiers: what lookups and tables ask of the fastest one, in host memory or on a device."""

import contextlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..kernels.arrays import Floats, Int64s
from ..optim.configs import Hyper
from .direct import OneTable
from .joined import Joined


class Tier(ABC):
    """Rows of one layout. A lease that is given is of the whole batch, or None. ``arg_max``: [bags, dim], of each
    maximum the position that gave it, an array of the tier's. ``mode``: as of ``kernels.slots``. Methods raise
    ClosedError if the pool was closed, DamagedError if a row on SSD failed its check, and ValueError for an id outside
    its table, unless ids were read before; on a device that may be a later call (see ``hbm.kernel_types.IdCheck``).

    Attributes:
        reads_keys: lookups find rows by key, so that ids are checked and read when they are prepared.
        lock: held while rows come into device memory or go down; taken before the locks of the pool.
        num_leased: leases that use rows in device memory.
        num_dirty: rows that are newer than those in host memory.
        host_bytes: bytes of host memory that device memory takes.
        are_all_in: every row is in host memory, to stay, and lookups go there.
    """

    on_device: bool = False
    reads_keys: bool = False
    lock: AbstractContextManager[Any]
    num_leased: Any = 0
    num_dirty: Any = 0
    host_bytes: Any = 0
    are_all_in: Any = False

    # Lookups

    @abstractmethod
    def has_room(self, joined: Joined) -> bool:
        """Whether the rows could be held, with those that are."""

    @abstractmethod
    def stage(self, joined: Joined) -> Any:
        """Bring the rows in and hold them: the lease. None, and nothing is held, if there is no room."""

    @abstractmethod
    def look_up(self, joined: Joined, mode: int, out: Tensor, lease: Any, *, keep: bool) -> tuple[Any, Any]:
        """Pool every bag into ``out``, float32 [batch, columns], of any content. Returns the lease and, of maxima,
        ``arg_max``. ``keep``: a backward follows, so the lease is held if there is room."""

    @abstractmethod
    def dot(self, joined: Joined, grad_out: Tensor, lease: Any) -> Floats:
        """float32 [N], on the host: the gradient of each position's weight."""

    @abstractmethod
    def whole(self, joined: Joined, lease: Any) -> Any:
        """The lease that was given, or one of all rows, of which there are some; None if they do not fit."""

    @abstractmethod
    def update(self, joined: Joined, mode: int, hyper: list[Hyper], grad_out: Tensor, arg_max: Any, lease: Any) -> None:
        """Merge each row's gradients in their fixed order, and update it. Without a lease, if a later part of a split
        batch cannot be fetched, the rows of earlier parts are updated. ``hyper``: of each table."""

    @abstractmethod
    def gradients(self, joined: Joined, mode: int, grad_out: Tensor, arg_max: Any) -> tuple[Tensor, Tensor]:
        """What ``update`` would apply: the rows' keys, int64 [U], distinct, and float32 [U, dim]."""

    # Rows by key

    def are_in_memory(self, keys: Int64s) -> bool:  # noqa: ARG002 - device memory copies ids and results
        """Whether a lookup of ``keys`` (int64 [n]) reads nothing from SSD and copies nothing to a device."""
        return False

    @abstractmethod
    def read(self, keys: Int64s) -> Tensor:
        """Rows of ``keys`` (int64 [n], n > 0), [n, dim], on its device: bits unchanged, quantized ones as float32."""

    @abstractmethod
    def read_state(self, keys: Int64s) -> Tensor:
        """float32 [n, state_dim], on its device: the optimizer state of ``keys`` (int64 [n], n > 0)."""

    def read_in_memory(self, keys: Int64s) -> Tensor | None:  # noqa: ARG002
        """``read`` if ``are_in_memory``, else None."""
        return None

    @abstractmethod
    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights of ``keys`` (int64 [n]) with ``rows`` [n, dim] of the table's dtype; of equal keys the last
        wins; optimizer state is kept."""

    @abstractmethod
    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        """Overwrite whole rows with first values and state: those that rows ``ids`` of the table would have. Keys are
        of one table; no row of them is in use, but by batches that were prepared."""

    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:  # noqa: ARG002
        """A short way for small lookups of a table, if there is one."""
        return None

    # State

    def flush(self) -> None:  # noqa: B027 - host memory has nothing to do for these
        """Copy newer rows to host memory; errors as ``look``."""

    def look(self) -> None:  # noqa: B027
        """ValueError, once for each, for a batch that had a wrong id and was used. Waits until all are known."""

    def emptied(self) -> AbstractContextManager[Any]:
        """Within it, host memory has the newest value of every row, and device memory has no row."""
        return contextlib.nullcontext()

    def refuse(self) -> None:  # noqa: B027
        """Refuse further use, by ClosedError."""

    def close(self) -> None:  # noqa: B027
        """Refuse further use, and let nothing use the rows when it returns."""

    @abstractmethod
    def check_integrity(self) -> None:
        """AssertionError unless the counts agree with the rows."""
