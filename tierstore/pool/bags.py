"""The bags of a batch, and the pooling of rows in slots, split over threads."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from .. import kernels
from ..kernels import quantized
from ..kernels.arrays import Floats, Ids, Int32s, Int64s
from ..kernels.threads import Workers
from ..rows import KEY_ROW_BITS
from .arena import RowArrays

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


def pool_part(rows: RowArrays, workers: Workers, bags: Bags, pooling: Pooling, first: int, slots: Int32s) -> None:
    """Pool the positions from ``first`` on, whose slots are given. The caller holds the lock over the rows, if any."""
    pool_rows: Any = quantized.pool_rows if rows.layout.is_quantized else kernels.pool_rows

    def work(begin: int, end: int) -> None:
        pool_rows(
            begin, end, first, first + len(slots), bags.starts, slots, bags.scale, pooling.mode, rows.weights,
            rows.layout.dim, rows.half, bags.columns, bags.batch, pooling.out, pooling.arg_max,
        )  # fmt: skip

    workers.share(work, bags.starts)


def dot_part(rows: RowArrays, bags: Bags, grad_out: Floats, first: int, slots: Int32s, grad_scale: Floats) -> None:
    """Gradients of the weights of the positions from ``first`` on, added to ``grad_scale``, float32 [N]; see
    ``pool_part``.

    Args:
        grad_out: float32 [batch, columns].
    """
    dot_rows: Any = quantized.dot_rows if rows.layout.is_quantized else kernels.dot_rows
    dot_rows(
        0, len(bags.starts) - 1, first, first + len(slots), bags.starts, slots, rows.weights, rows.layout.dim,
        rows.half, bags.columns, bags.batch, grad_out, grad_scale,
    )  # fmt: skip
