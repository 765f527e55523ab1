"""What pools are given of a batch, to look its rows up and to update them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s, Words
from .backward import Groups
from .bags import Bags


class Distinct(NamedTuple):
    """The rows of a batch: the number of each position's, int32 [N], and their keys, int64 [U], in order of use."""

    inverse: Int32s
    keys: Int64s

    @classmethod
    def of(cls, keys: Int64s) -> "Distinct":
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
    """A lookup directly from ids: slots, int32 [N], if they were asked for. If anything ``failed``, it was none, and
    its output is undefined: positions of ids that are no rows, and negative numbers for rows that are not resident."""

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
