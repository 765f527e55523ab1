"""The bags of a batch, and how they are pooled."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ..kernels.arrays import Floats, Ids, Int32s, Int64s
from ..layout import KEY_ROW_BITS

NO_INTS: Final = np.empty(0, np.int32)
NO_ARG_MAX: Final = np.empty((0, 0), np.int32)
NO_FLOATS: Final = np.empty(0, np.float32)


class Numbering(Protocol):
    """Slots where row r of a table is in slot ``first + r``."""

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0."""
        ...


class Indexed(Protocol):
    """A table of a store."""

    @property
    def index(self) -> int:
        """Its number there."""
        ...


class Bags(NamedTuple):
    """The bags of a batch, feature by feature.

    Attributes:
        tables: distinct, in order of their positions.
        bounds: int64 [T + 1], the bags of each table.
        starts: int64 or int32 [K + 1], the positions of each bag.
        columns: int32 or int64 [F], where a feature's results begin in a row of the output.
        batch: bags of a feature.
        scale: float32 [N], per-sample weights, or empty.
    """

    tables: Sequence[Indexed]
    bounds: Int64s
    starts: Any
    columns: Ids
    batch: int
    scale: Floats

    def shifts(self, numbering: Numbering) -> Int64s:
        """int64 [N]: by how much the key of each position is above its slot."""
        indices = np.array([table.index for table in self.tables], np.int64)
        shifts = (indices << KEY_ROW_BITS) - numbering.first_slots(indices)
        return np.repeat(shifts, np.diff(self.starts[self.bounds]))


class Pooling(NamedTuple):
    """How a batch's rows are pooled, and into what.

    Attributes:
        mode: ``kernels.SUM``, ``MEAN`` or ``MAX``.
        out: float32 [batch, columns], written; of any content before.
        arg_max: int32 [K, dim], written by max pooling; else empty.
    """

    mode: int
    out: Floats
    arg_max: Int32s
