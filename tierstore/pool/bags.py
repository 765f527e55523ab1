"""The bags of a batch, and how they are pooled."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..kernels.arrays import Floats, Ids, Int32s, Int64s
from ..layout import KEY_ROW_BITS

NO_INTS: Final = np.empty(0, np.int32)
NO_ARG_MAX: Final = np.empty((0, 0), np.int32)
NO_FLOATS: Final = np.empty(0, np.float32)


class Numbering(Protocol):
    """Slots where row r of a table is in slot ``first + r``."""

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0."""


class Features:
    """Features that one lookup serves, the same in each batch; those of one table are neighbours.

    Args:
        tables: distinct, all in one pool.
        bounds: int64 [tables + 1], the features of each.
        columns: int32 or int64 [features], where each one's results begin in a row of the output.

    Attributes:
        table_indices: int64 [tables], their places in the store.
        table_of: int32 [features], which of ``tables`` each one's is; indices: int64 [features], its place in the
            store; num_rows: int64 [features].
    """

    def __init__(self, tables: list[Any], bounds: ArrayLike, columns: Ids) -> None:
        self.tables = tables
        self.bounds = np.asarray(bounds, np.int64)
        self.columns = columns
        self.table_indices = np.array([table.index for table in tables], np.int64)
        self.table_of = np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(self.bounds))

    @classmethod
    def of(cls, owners: Sequence[Any], columns: ArrayLike) -> "Features":
        """Those of these tables, one for each feature."""
        bounds = [i for i, table in enumerate(owners) if not i or table is not owners[i - 1]]
        return cls(list(dict.fromkeys(owners)), [*bounds, len(owners)], np.asarray(columns, np.int32))

    @cached_property
    def indices(self) -> Int64s:
        return self.table_indices[self.table_of]

    @cached_property
    def num_rows(self) -> Int64s:
        return np.array([table.config.num_embeddings for table in self.tables], np.int64)[self.table_of]


class Bags(NamedTuple):
    """The bags of a batch, feature by feature.

    Attributes:
        table_indices, table_of, columns: of ``Features``.
        bounds: int64 [T + 1], the bags of each table.
        starts: int64 or int32 [K + 1], the positions of each bag.
        batch: bags of a feature.
        scale: float32 [N], per-sample weights, or empty.
    """

    table_indices: Int64s
    table_of: Int32s
    bounds: Int64s
    starts: Any
    columns: Ids
    batch: int
    scale: Floats

    def shifts(self, numbering: Numbering) -> Int64s:
        """int64 [N]: by how much the key of each position is above its slot."""
        shifts = (self.table_indices << KEY_ROW_BITS) - numbering.first_slots(self.table_indices)
        return np.repeat(shifts, np.diff(self.starts[self.bounds]))


class Pooling(NamedTuple):
    """How a batch's rows are pooled (``kernels.SUM``, ``MEAN`` or ``MAX``), and into what: float32 [batch, columns] of
    any content, and of maxima the positions, int32 [K, dim]."""

    mode: int
    out: Floats
    arg_max: Int32s
