"""What kernels in Triton and for the CPU take: a batch, its ids, the cache's bookkeeping; and the mixer of keys.

A key's set is ``(upper half of its mixed key * sets) >> 32``: it ascends with the mixed key, and mixing loses nothing.
So one sort of a batch's mixed keys brings equal keys together and the keys of a set together. The mixer is splitmix64's
(``kernels.hashing``) without its first sum and last shift, the range reduction that of ``kernels.hash_table``.

Shape legend: N positions (ids of the batch), U unique rows, F features, B samples, K = F * B bags.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..kernels.arrays import Int64s
from .streams import Mark

WAYS: Final = 32  # slots of a set: as many as a warp has threads, and 256 bytes of keys
PIN: Final = 16  # one pin of a slot, whose flags are at least this while it is pinned
NO_SUCH_SLOT: Final = 1 << 30  # flags of a way that the last set does not have: for ever pinned
STAMP_BITS: Final = 40  # of a rank, see ``CacheState``
STAMP_MASK: Final = (1 << STAMP_BITS) - 1
MAX_COUNT: Final = (1 << 22) - 1  # accesses are counted up to here
NUM_STATUSES: Final = 8  # a power of two, as Triton's ranges are
SUMMARY_ROWS: Final = 32  # of a plan's summary: so that not all programs add to the same few bytes
MIX_A: Final = 0xBF58476D1CE4E5B9  # the mixer's factors
MIX_B: Final = 0x94D049BB133111EB


class Bags(NamedTuple):
    """Bags of positions, feature-major: bag ``k`` is feature ``k // batch`` of sample ``k % batch``.

    Attributes:
        bag_starts: int32 [K + 1]; bag ``k`` holds the positions ``[bag_starts[k], bag_starts[k + 1])``.
        bag_of: int32 [N], the bag of each position; ``number_bags`` of the kernels makes it.
        columns: int32 or int64 [F], where each feature's result begins in the output's columns.
        table_of: int32 [F], which row of ``hyper`` and ``code_of`` rules the rows of each feature.
        batch: B.
        scale: float32 [N], per-sample weights, or None.
        column_step: a power of two that divides every one of ``columns``. It changes no result: with 4, a GPU reads
            and writes results 16 bytes at a time. (If it does not divide one, the GPU fails on a misaligned address.)
    """

    bag_starts: Tensor
    bag_of: Tensor
    columns: Tensor
    table_of: Tensor
    batch: int
    scale: Tensor | None = None
    column_step: int = 1


class DeviceIds(NamedTuple):
    """Ids of a batch that are on the device already, not checked, the features in their order in ``Bags``."""

    ids: Tensor  # int64 or int32 [N], N > 0
    offsets: Tensor  # int64 or int32 [K + 1], or [K] without the last, which is then N
    scale: Tensor | None  # float32 [N], per-sample weights


class IdCheck(NamedTuple):
    """What is wrong with the ids of a batch that the device joins, unchecked by the host.

    The kernel writes it to page-locked memory, and clears a word on the device, by which the batch then changes no row.
    The host asks whether the kernel is done when it gives the device more work, and waits only where it waits anyway.

    ``record``, int64 [F + 1], page-locked, has a wrong id of each feature, 0 if it has none; and one more than the
    index of a wrong offset, 0 if there is none.
    """

    is_right: Tensor  # int32 [1], on the device: 1, or 0 if something is wrong
    record: Tensor
    made: Mark  # when both are written
    explain: Callable[[Int64s], ValueError]  # the error for a record that is not all 0

    def require_right(self) -> None:
        """ValueError for what is wrong. Waits until that is known."""
        if not self.made.query():
            self.made.synchronize()
        record: Int64s = self.record.numpy()
        if record.any():
            raise self.explain(record)


class Groups(NamedTuple):
    """N keys or slots, grouped: U distinct ones, each with its positions in id-list order. The host does not know U.

    Attributes:
        order: int64 [N], positions.
        starts: int32 [N + 1]; the positions of unique row ``u < U`` are ``order[starts[u]:starts[u + 1]]``;
            ``starts[U]`` is N, what follows is undefined.
        num_unique: int32 [1], U.
        distinct: int64 or int32 [N]; the first U are the distinct ones: keys in order of their cache sets, slots
            ascending.
        inverse: of keys, int32 [N], which of the distinct ones each position has.
    """

    order: Tensor
    starts: Tensor
    num_unique: Tensor
    distinct: Tensor
    inverse: Tensor | None = None

    def part(self, first: int, last: int) -> "Groups":
        """Some of the distinct ones; groups are numbered as before, and U is how many of those there are."""
        count = (self.num_unique - first).clamp(0, last - first)
        return self._replace(num_unique=count, distinct=self.distinct[first:last])


@dataclass(slots=True, eq=False)
class DeviceBatch:
    bags: Bags
    rows: Tensor  # int32 [N], the slot of each position, or int64 [N], its key
    ready: Mark  # when the bags are there
    rows_ready: Mark
    check: IdCheck | None = None  # of ids that the device joined
    groups: Groups | None = None  # None until somebody asked for them
    grouped: Mark | None = None

    def __len__(self) -> int:
        return len(self.rows)


class Status(IntEnum):
    """What the plan has for a key."""

    HIT = 0
    TAKEN = 1  # it lies elsewhere and takes no slot
    FREE_SLOT = 2
    CLEAN_VICTIM = 3
    DIRTY_VICTIM = 4  # the victim is dirty: write it back before the plan is carried out
    CONFLICT = 5  # every slot of the set is pinned
    NO_KEY = 7  # there are fewer keys


class CacheState(NamedTuple):
    """Bookkeeping of slots, set after set, 32 a set."""

    keys: Tensor
    """int64 [sets * WAYS]."""
    ranks: Tensor
    """int64 [sets * WAYS]: the victim is the unpinned row of least rank. Least recently used: the number of the last
    access. Least frequently used: ``accesses << STAMP_BITS | number of the last access`` (after 2**40 accesses the
    least used is not always found)."""
    flags: Tensor
    """int32 [sets * WAYS]: those of ``flags``, plus ``PIN`` for each pin; 0 is a free slot."""

    @classmethod
    def empty(cls, capacity: int, device: torch.device) -> "CacheState":
        size = -(-capacity // WAYS) * WAYS
        flags = torch.zeros(size, dtype=torch.int32, device=device)
        flags[capacity:] = NO_SUCH_SLOT
        keys, ranks = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        return cls(keys, ranks, flags)


class Plan(NamedTuple):
    """Where the first U of N distinct keys would lie. ``summary``, int32 [SUMMARY_ROWS, NUM_STATUSES]: the column sums
    are how many keys have each status. It is overwritten after the next plan's commit."""

    keys: Tensor  # int64 [N]
    slots: Tensor  # int32 [N]; where a key lies if that is elsewhere; -1 for a conflict miss, and from U on
    statuses: Tensor  # int8 [N]: Status; from U on NO_KEY
    summary: Tensor


def mixed(keys: Tensor) -> Tensor:
    """int64 [n]: the keys mixed, one to one; in signed order, which is the order of their sets."""
    mix = (keys ^ _shifted(keys, 30)) * (MIX_A - 2**64)
    mix = (mix ^ _shifted(mix, 27)) * (MIX_B - 2**64)
    return mix ^ -(2**63)


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def sets_of(mixed_keys: Tensor, num_sets: int) -> Tensor:
    """int32 [n]: the set of each mixed key."""
    upper = (mixed_keys >> 32) + (1 << 31)
    return ((upper * num_sets) >> 32).to(torch.int32)
