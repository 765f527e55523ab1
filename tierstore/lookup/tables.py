"""The contracts of tables and stores, as lookups use them."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from ..config import TableConfig
from ..errors import ClosedError
from ..kernels.arrays import Floats
from ..kernels.threads import Workers
from ..pool import Pool
from ..rows import RowLayout

_T = TypeVar("_T")


class FillsOutput(Protocol):
    """A lookup, to whoever makes its output."""

    wants_zeros: bool
    """It adds to what it is given."""


class LookupStore(Protocol):
    """The store that a table is of."""

    @property
    def device(self) -> torch.device:
        """Where results live."""
        ...

    @property
    def readonly(self) -> bool:
        """Whether no row is trained or written."""
        ...

    @property
    def workers(self) -> Workers: ...


class LookupTable(Protocol):
    """A table whose rows are looked up and trained."""

    config: TableConfig
    index: int
    layout: RowLayout
    num_changes: int
    """How often rows were updated, written or exchanged."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> LookupStore: ...

    @property
    def pool(self) -> Pool:
        """Where its rows live now; raises ClosedError or TableError if they no longer do."""
        ...

    @property
    def rounding_seed(self) -> int:
        """Rounding seed of the last counted update."""
        ...

    def next_hyper(self) -> Floats:
        """Count one more update: its hyper-parameters, float32 [NUM_HYPER]."""
        ...

    def id_error(self, row: int) -> ValueError:
        """The error for an id that is not a row."""
        ...

    def require_float(self) -> None:
        """Raises ReadOnlyError if its rows are quantized."""
        ...


def in_pool_of(table: LookupTable, work: Callable[[Pool], _T]) -> _T:
    """Run it in the table's pool; run it again if a new table replaced the pool meanwhile."""
    while True:
        pool = table.pool
        try:
            return work(pool)
        except ClosedError:
            if pool is table.pool:  # which fails in a closed store
                raise
