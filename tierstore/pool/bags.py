"""What pools are given of a batch, to look its rows up: bags, rows, how to pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s
from ..kernels.hashing import SECRET
from ..layout import KEY_ROW_BITS

NO_INTS: Final = np.empty(0, np.int32)
NO_ARG_MAX: Final = np.empty((0, 0), np.int32)
NO_FLOATS: Final = np.empty(0, np.float32)


class Numbering(Protocol):
    """Slots where row r of a table is in slot ``first + r``."""

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0."""


class Features:
    """Features that one lookup serves, the same in each batch; those of one table are neighbours."""

    def __init__(self, tables: list[Any], bounds: ArrayLike, columns: Ids) -> None:
        self.tables = tables  # distinct, all in one pool
        self.bounds = np.asarray(bounds, np.int64)  # int64 [tables + 1], the features of each
        self.columns = columns  # int32 or int64 [features], where results begin in a row of the output
        self.table_indices = np.array([table.index for table in tables], np.int64)  # their places in the store
        # int32 [features], which of ``tables`` each one's is
        self.table_of = np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(self.bounds))

    @classmethod
    def of(cls, owners: Sequence[Any], columns: ArrayLike) -> "Features":
        """Those of these tables, one for each feature."""
        bounds = [i for i, table in enumerate(owners) if not i or table is not owners[i - 1]]
        return cls(list(dict.fromkeys(owners)), [*bounds, len(owners)], np.asarray(columns, np.int32))

    @cached_property
    def indices(self) -> Int64s:
        """int64 [features], its table's place in the store."""
        return self.table_indices[self.table_of]

    @cached_property
    def has_dynamic_ids(self) -> bool:
        return any(table.config.ids is not None for table in self.tables)

    @cached_property
    def num_rows(self) -> Int64s:
        return np.array([table.config.num_embeddings for table in self.tables], np.int64)[self.table_of]


class Bags(NamedTuple):
    """The bags of a batch, feature by feature."""

    table_indices: Int64s  # as the two below of ``Features``
    table_of: Int32s
    bounds: Int64s  # int64 [T + 1], the bags of each table
    starts: Any  # int64 or int32 [K + 1], the positions of each bag
    columns: Ids  # of ``Features``
    batch: int  # bags of a feature
    scale: Floats  # float32 [N], per-sample weights, or empty

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


class Distinct(NamedTuple):
    """The rows of a batch: the number of each position's, int32 [N], and their keys, int64 [U], by first position."""

    inverse: Int32s
    keys: Int64s

    @classmethod
    def of(cls, keys: Int64s) -> "Distinct":
        unique_keys = np.empty_like(keys)
        inverse = np.empty(len(keys), np.int32)
        scratch = np.full(1 << (2 * len(keys) - 1).bit_length(), -1, np.int32)
        count = kernels.unique_in_order(keys, scratch, unique_keys, inverse, SECRET)
        return cls(inverse, unique_keys[:count])


@dataclass(frozen=True, eq=False)
class Batch:
    """The positions of a batch, bag after bag; all in tables of one pool."""

    bags: Bags  # where they lie
    rows: Any  # int64 [N], keys; or int32 [N], slots, where each row has its own (``ResidentRows.numbering``)
    by_sample: bool = False  # rows are used sample by sample, not feature by feature

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def distinct(self) -> Distinct:
        return Distinct.of(self.rows)

    @property
    def order(self) -> Any:
        """What ``distinct.keys`` are indexed by to be in order of use."""
        if not self.by_sample:
            return slice(None)
        inverse, keys = self.distinct
        order = np.empty(len(keys), np.int32)
        kernels.order_by_sample(self.bags.starts, self.bags.batch, inverse, order)
        return order


class IdsOfBags(NamedTuple):
    """Ids of a batch as the caller has them, which may change until they are read: what ``kernels.look_up`` and
    ``kernels.join_ids`` take behind the range of bags."""

    ids: Ids
    starts: Int64s  # int64 [F], where each feature's begin in ``ids``
    firsts: Int64s  # int64 [F], the slot or key of row 0 of each feature's table
    num_rows: Int64s  # int64 [F], of that table
    batch: int  # bags of each feature
    bag_starts: Ids  # int64 or int32 [F * batch + 1]


class FromIds(NamedTuple):
    """A lookup directly from ids. If anything ``failed``, its output is undefined."""

    slots: Int32s  # int32 [N], if they were asked for
    failed: list[int]  # positions of ids that are no rows, and negative numbers for rows that are not resident
