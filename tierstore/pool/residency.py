"""The contract of resident rows: bring in, look up and update the rows of a batch.

Implementations: ``evicting`` (rows may be evicted) and ``in_place`` (every row keeps its own slot).
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from .. import kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s, Words
from .backward import Groups
from .pins import Lease


class Distinct(NamedTuple):
    """The rows of a batch.

    Attributes:
        inverse: int32 [N], each position's row number.
        keys: int64 [U], the rows' keys in order of first use.
    """

    inverse: Int32s
    keys: Int64s

    @classmethod
    def of(cls, keys: Int64s) -> "Distinct":
        """Those of a batch's keys, int64 [N]."""
        unique_keys = np.empty_like(keys)
        inverse = np.empty(len(keys), np.int32)
        scratch = np.full(1 << (2 * len(keys) - 1).bit_length(), -1, np.int32)
        count = kernels.unique_in_order(keys, scratch, unique_keys, inverse)
        return cls(inverse, unique_keys[:count])


class Numbering(Protocol):
    """Slots where row r of a table is in slot ``first + r``."""

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0."""
        ...


class Batch(Protocol):
    """The positions of a batch, bag after bag; all in tables of one pool.

    Attributes:
        bag_starts: int64 [bags + 1], where each bag begins.
        scale: float32 [N], per-sample weights, or empty.
        columns: int32 [features], where each feature's results begin in the output's columns.
        batch: bags of each feature.
    """

    bag_starts: Int64s
    scale: Floats
    columns: Int32s
    batch: int

    def __len__(self) -> int: ...

    @property
    def keys(self) -> Int64s:
        """int64 [N], row keys. ValueError, which names table and id, for an id outside its table."""
        ...

    @property
    def order(self) -> Int64s | None:
        """int64 [N], the positions in order of use of their rows; None if they already are."""
        ...

    @property
    def is_read(self) -> bool:
        """Whether the caller's ids were read: they may have changed since."""
        ...

    @property
    def distinct(self) -> Distinct:
        """The rows of ``keys``."""
        ...

    def slots(self, numbering: Numbering) -> Int32s:
        """int32 [N]; errors as ``keys``."""
        ...

    def note_slots(self, slots: Int32s, numbering: Numbering) -> None:
        """Take over what ``slots`` would find."""
        ...

    def shifts(self, numbering: Numbering) -> Int64s:
        """int64 [N]: by how much the key of each position is above its slot."""
        ...

    def plan(self, numbering: Numbering) -> tuple[Ids, Int64s, Int64s, Int64s, int, Int64s]:
        """What ``kernels.look_up`` takes behind the range of bags."""
        ...

    def check(self, positions: list[int]) -> None:
        """ValueError if one of them is the position of an id outside its table."""
        ...


class Pooling(NamedTuple):
    """How a batch's rows are pooled, and into what.

    Attributes:
        mode: ``kernels.SUM``, ``MEAN`` or ``MAX``.
        out: float32 [batch, columns], written; of any content before.
        arg_max: int32 [bags, dim], written by max pooling; else empty.
    """

    mode: int
    out: Floats
    arg_max: Int32s


class Update(NamedTuple):
    """One update of the rows of a batch.

    Attributes:
        groups: its positions, to be grouped by row.
        codes: int64 [T], optimizer of each table; hyper: float32 [T, NUM_HYPER].
        gradient: float32 [batch, columns], C-contiguous.
        seeds: uint64 [T], what each table rounds with, or None if all round to nearest; see ``kernels.rounding``.
    """

    groups: Groups
    codes: Int64s
    hyper: Floats
    gradient: Floats
    seeds: Words | None


class OneTable(Protocol):
    """Lookups of one table by one compiled call."""

    @property
    def is_over(self) -> bool:
        """Whether the pool was closed."""
        ...

    def rows(self, ids: Int64s) -> Floats | None:
        """float32 [n, dim], the rows of these ids; None if one is no row or not resident."""
        ...

    def pooled(self, ids: Tensor, offsets: Tensor, mode: int) -> Tensor | None:
        """float32 [bags, dim], or None if a lookup of the usual kind must do it."""
        ...


class ResidentRows(Protocol):
    """See the module's docstring. A lease that is given is of the whole batch, or None.

    Methods raise ClosedError if the pool was closed, DamagedError if a row on SSD failed its check, and ValueError for
    an id outside its table.
    """

    def check(self, batch: Batch) -> None:
        """Find ids outside their tables now, if ids are not checked by the kernel that looks rows up."""
        ...

    def has_room(self, batch: Batch) -> bool:
        """Whether the rows could be held, beside those that are."""
        ...

    def stage(self, batch: Batch) -> Lease | None:
        """Bring the rows in and hold them; None, and nothing is read, if there is no room."""
        ...

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        """(first position, lease): parts of the batch, in order. A lease is over when the next is asked for."""
        ...

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        """Pool every bag. Returns the lease; with ``keep``, one that is held, if there is room."""
        ...

    def whole(self, batch: Batch, lease: Lease | None) -> Lease | None:
        """The lease that was given, or one of all rows of the batch, for ``update``; None if they do not fit."""
        ...

    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        """Merge each row's gradients in their fixed order, mark it dirty, update it.

        Without a lease, if a later part of a split batch cannot be brought in, the rows of earlier parts are updated.
        """
        ...

    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """Lookups of a table by one compiled call; None if that is not to be had."""
        ...
