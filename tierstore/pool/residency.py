"""The contract of resident rows: bring in, look up and update the rows of a batch.

Implementations: ``evicting`` (rows may be evicted) and ``in_place`` (every row keeps its own slot).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from .. import kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s, Words
from .backward import Groups
from .bags import Bags, Numbering, Pooling
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


@dataclass(frozen=True, eq=False)
class Batch:
    """The positions of a batch, bag after bag; all in tables of one pool.

    Attributes:
        bags: where they lie.
        rows: int64 [N], keys; or int32 [N], slots, where each row has its own (``ResidentRows.numbering``).
        order: int64 [N], the positions in order of use of their rows; None if they already are, or it does not matter.
    """

    bags: Bags
    rows: Any
    order: Int64s | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def distinct(self) -> Distinct:
        """The rows, by key."""
        return Distinct.of(self.rows)


class IdsOfBags(NamedTuple):
    """Ids of a batch as the caller has them, which may change until they are read: what ``kernels.look_up`` and
    ``kernels.join_ids`` take behind the range of bags.

    Attributes:
        ids: int64 or int32.
        starts: int64 [F], where each feature's begin in ``ids``.
        firsts: int64 [F], the slot or key of row 0 of each feature's table; num_rows: int64 [F], of it.
        batch: bags of each feature.
        bag_starts: int64 or int32 [F * batch + 1].
    """

    ids: Ids
    starts: Int64s
    firsts: Int64s
    num_rows: Int64s
    batch: int
    bag_starts: Ids


class FromIds(NamedTuple):
    """A lookup directly from ids.

    Attributes:
        slots: int32 [N], if they were asked for, else empty.
        failed: if anything, the lookup was none, and its output is undefined: positions of ids that are no rows, and
            negative numbers for rows that are not resident.
    """

    slots: Int32s
    failed: list[int]


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

    Methods raise ClosedError if the pool was closed, and DamagedError if a row on SSD failed its check.

    Attributes:
        numbering: of slots, which batches have here; None: they have keys.
        takes_ids: whether there is ``look_up_ids``.
    """

    numbering: Numbering | None
    takes_ids: bool

    def has_room(self, batch: Batch) -> bool:
        """Whether the rows could be held, beside those that are."""
        ...

    def stage(self, batch: Batch) -> Lease | None:
        """Bring the rows in and hold them; None, and nothing is read, if there is no room."""
        ...

    def parts(self, batch: Batch, lease: Lease | None) -> Iterator[tuple[int, Lease]]:
        """(first position, lease): parts of the batch, in order. A lease is over when the next is asked for."""
        ...

    def look_up_ids(self, ids: IdsOfBags, bags: Bags, pooling: Pooling, *, keep: bool) -> FromIds:
        """Check ids and pool every bag, in one pass; ``keep`` asks for slots."""
        ...

    def held(self, slots: Int32s) -> Lease:
        """A held lease of rows that ``look_up_ids`` gave the slots of."""
        ...

    def look_up(self, batch: Batch, pooling: Pooling, lease: Lease | None, *, keep: bool) -> Lease | None:
        """Pool every bag. Returns the lease; with ``keep``, one that is held, if there is room."""
        ...

    def whole(self, batch: Batch) -> Lease | None:
        """A lease of all rows of the batch, for ``update``; None if they do not fit, or there are none."""
        ...

    def update(self, batch: Batch, update: Update, lease: Lease | None) -> None:
        """Merge each row's gradients in their fixed order, mark it dirty, update it.

        Without a lease, if a later part of a split batch cannot be brought in, the rows of earlier parts are updated.
        """
        ...

    def one_table(self, table_index: int, num_rows: int) -> OneTable | None:
        """Lookups of a table by one compiled call; None if that is not to be had."""
        ...
