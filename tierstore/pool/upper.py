"""What a pool asks of the tier above it."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from ..kernels.arrays import Int64s


class UpperTier(Protocol):
    """A faster tier that may hold newer values of a pool's rows."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while rows come in or go down; taken before the locks of the pool."""
        ...

    @property
    def num_leased(self) -> int:
        """Leases that use rows."""
        ...

    @property
    def num_dirty(self) -> int:
        """Rows that are newer than those of the pool below."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        ...

    def read(self, keys: Int64s) -> Tensor:
        """Rows of ``keys`` (int64 [n]), [n, dim], on its device."""
        ...

    def write(self, keys: Int64s, rows: Tensor) -> None:
        """Overwrite weights of ``keys`` (int64 [n])."""
        ...

    def flush(self) -> None:
        """Copy newer rows to the pool below; errors as ``look``."""
        ...

    def look(self) -> None:
        """ValueError, once for each, for a batch that had a wrong id and was used. Waits until all are known."""
        ...

    def emptied(self) -> AbstractContextManager[Any]:
        """Within it, no row is in this tier."""
        ...

    def refuse(self) -> None:
        """Refuse further use, by ClosedError."""
        ...

    def close(self) -> None:
        """Refuse further use, and let nothing use the rows when it returns."""
        ...
