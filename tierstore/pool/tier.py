"""The fastest tier of a pool: what tables read, write and look up in.

Implementations: ``HostTier``, rows in host memory alone, and ``hbm.base.DeviceRows``, device memory above it, which may
have newer values.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.arrays import Int64s
from .arena import Arena
from .residency import OneTable, ResidentRows
from .transfers import Transfers


def raw_weights(rows: Tensor) -> NDArray[Any]:
    """Numpy view of weights as kernels see them: float32, or uint16 for the dtypes of 16 bits."""
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


class Tier(Protocol):
    """See the module's docstring.

    Attributes:
        on_device: whether lookups run in device memory.
    """

    on_device: bool

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while rows come into device memory or go down; taken before the locks of the pool."""
        ...

    @property
    def num_leased(self) -> int:
        """Leases that use rows in device memory."""
        ...

    @property
    def num_dirty(self) -> int:
        """Rows that are newer than those in host memory."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that device memory takes."""
        ...

    def are_in_memory(self, keys: Int64s) -> bool:
        """Whether a lookup of ``keys`` (int64 [n]) reads nothing from SSD and copies nothing to a device."""
        ...

    def read(self, keys: Int64s) -> Tensor:
        """Rows of ``keys`` (int64 [n], n > 0), [n, dim], on its device."""
        ...

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        """``read`` if ``are_in_memory``, else None."""
        ...

    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights of ``keys`` (int64 [n]) with ``rows`` [n, dim] of the table's dtype."""
        ...

    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """Lookups of a table by one compiled call; None if that is not to be had."""
        ...

    def flush(self) -> None:
        """Copy newer rows to host memory; errors as ``look``."""
        ...

    def look(self) -> None:
        """ValueError, once for each, for a batch that had a wrong id and was used. Waits until all are known."""
        ...

    def emptied(self) -> AbstractContextManager[Any]:
        """Within it, host memory has the newest value of every row, and device memory has no row."""
        ...

    def refuse(self) -> None:
        """Refuse further use, by ClosedError."""
        ...

    def close(self) -> None:
        """Refuse further use, and let nothing use the rows when it returns."""
        ...

    def check_integrity(self) -> None:
        """AssertionError unless the counts agree with the rows."""
        ...


class HostTier:
    """A pool's rows in host memory."""

    on_device = False
    num_leased = num_dirty = host_bytes = 0

    def __init__(self, arena: Arena, rows: ResidentRows, transfers: Transfers) -> None:
        self.lock: AbstractContextManager[Any] = contextlib.nullcontext()
        self.one_table = rows.one_table
        self.are_in_memory = transfers.are_in
        self._arena = arena
        self._layout = arena.layout
        self._transfers = transfers

    def check_integrity(self) -> None:
        """See ``Tier``."""
        with self._arena.lock:
            self._arena.cache.check_integrity()

    def _empty(self, num_rows: int) -> Tensor:
        return torch.empty((num_rows, self._layout.dim), dtype=self._layout.torch_dtype, device="cpu")

    def read(self, keys: Int64s) -> Tensor:
        out = self._empty(len(keys))
        self._transfers.read(keys, raw_weights(out))
        return out

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        out = self._empty(len(keys))
        return out if self._transfers.read_in_memory(keys, raw_weights(out)) else None

    def write(self, keys: Int64s, rows: Tensor) -> None:
        self._transfers.write(keys, raw_weights(rows.cpu().contiguous()))

    def flush(self) -> None: ...

    def look(self) -> None: ...

    def emptied(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def refuse(self) -> None: ...

    def close(self) -> None: ...
