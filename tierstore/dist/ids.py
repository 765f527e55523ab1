"""Dynamic ids of sharded tables. An id has one owner, by a hash of it, who gives it one of its own rows.

A lookup first asks the owners for the rows of its ids, and goes on with these as with any rows. In a forward pass that
trains, owners take the ids of all ranks for one batch, and decide together what is evicted and which ids get no row. So
ids, counts and evictions are those of one process that works off the ranks' batches as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..ids.id_map import owners_of
from ..kernels.arrays import Bools, Int64s, Words
from ..lookup.base import AnyLookup, Found, Use
from ..lookup.lookup import DynamicLookup, Sought, with_rows
from ..store.table_ids import Peers
from .owners import Owners, ShardedTable
from .ranks import Ranks

_DIGIT_BITS = 8
_HEAD = 4
"""Numbers for each table before the ids that a rank sends: how many they are, how many it has for all owners together,
and how many ids have rows, and are candidates, at this rank."""


@dataclass(frozen=True)
class RankPeers(Peers):
    """The owners of one table's ids during one batch, after which at most ``most`` ids of all owners have rows, and are
    candidates. ``find_positions`` exchanges ``positions``."""

    ranks: Ranks
    call: str
    most: Sequence[int]
    find_positions: Callable[[], Words]

    def excess(self, part: int, count: int, capacity: int) -> int:
        return self.total(count) - capacity if self.most[part] > capacity else 0

    def total(self, count: int) -> int:
        return sum(self.ranks.counts([count] * self.ranks.size, self.call))

    def lowest(self, items: Int64s, words: Callable[[Int64s], Sequence[Any]], count: int) -> Bools:
        """By digits, from the highest on: how many items of all owners have each, so which are certainly among them."""
        left, found = np.arange(len(items)), np.zeros(len(items), np.bool_)
        for word in words(items):
            for shift in range(8 * word.itemsize - _DIGIT_BITS, -1, -_DIGIT_BITS):
                digits = (word[left] >> word.dtype.type(shift)).astype(np.int64) & (1 << _DIGIT_BITS) - 1
                counts = np.bincount(digits, minlength=1 << _DIGIT_BITS)
                upto = np.cumsum(sum(self.ranks.gather(counts, self.call)))
                if upto[-1] <= count:
                    found[left] = True
                    return found
                digit = int(np.searchsorted(upto, count, side="right"))
                found[left[digits < digit]] = True
                left, count = left[digits == digit], count - (int(upto[digit - 1]) if digit else 0)
                if not count:
                    return found
        raise AssertionError("two items are equal")

    def positions(self, count: int) -> Words:
        found = self.find_positions()
        assert len(found) == count, "all ids that this owner was given"
        return found


class _Table(NamedTuple):
    """The ids of one table, and how many of them are each rank's; ``order`` lists them rank by rank."""

    table: ShardedTable
    sought: Sought
    order: Int64s
    counts: Int64s

    @classmethod
    def of(cls, sought: Sought, size: int) -> "_Table":
        table: Any = sought.table
        ranks = np.array(table.sharding.ranks)
        owners = ranks[owners_of(sought.ids, len(ranks))]
        return cls(table, sought, np.argsort(owners, kind="stable"), np.bincount(owners, minlength=size))

    def split(self, values: Int64s) -> list[Int64s]:
        """Each rank's."""
        return np.split(values[self.order], np.cumsum(self.counts)[:-1])

    def heads(self) -> Int64s:
        """int64 [ranks, _HEAD]."""
        assert self.table.local.ids is not None
        own = len(self.sought.ids), *self.table.local.ids.counts
        return np.stack([self.counts, *(np.full_like(self.counts, each) for each in own)], axis=1)

    def send_positions(self, ranks: Ranks, call: str) -> Words:
        """Collective: where the ids that this rank was given are, by feature, rank, and place in the rank's batch."""
        with ranks.telling():
            places = np.arange(len(self.sought.ids))
            features = np.searchsorted(self.sought.ends, places, side="right")
            sent = torch.from_numpy(np.concatenate(self.split(features << 48 | ranks.rank << 32 | places)))
        given = ranks.counts(self.counts.tolist(), call, then=1)
        return ranks.exchange(sent, self.counts.tolist(), given).numpy().view(np.uint64)


def find_over_ranks(ranks: Ranks, use: Use, sought: Sequence[Sought]) -> list[Found]:
    """The rows of some tables' ids, of which each rank has its own. Collective; errors of one rank as of ``counts``."""
    with ranks.telling():
        tables = [_Table.of(each, ranks.size) for each in sought]
        call = f"ids of {', '.join(each.table.name for each in tables)} to {use.name.lower()}"
        heads = np.stack([each.heads() for each in tables], axis=1)
        of_ranks = zip(*(each.split(each.sought.ids) for each in tables), strict=True)
        messages = [np.concatenate([head.ravel(), *ids]) for head, ids in zip(heads, of_ranks, strict=True)]
        lengths, joint = [len(each) for each in messages], torch.from_numpy(np.concatenate(messages))
    given = ranks.counts(lengths, call, then=1)
    taken = ranks.exchange(joint, lengths, given).numpy()
    with ranks.together(call, then=1):
        asked, rows, holds = _answer(ranks, use, tables, np.split(taken, np.cumsum(given)[:-1]))
    lengths = heads[:, :, 0].sum(1).tolist()
    parts = np.split(ranks.exchange(torch.from_numpy(rows), asked, lengths).numpy(), np.cumsum(heads[:, :, 0])[:-1])
    found = []
    for number, (each, hold) in enumerate(zip(tables, holds, strict=True)):
        keys = np.empty(len(each.order), np.int64)
        keys[each.order] = np.concatenate(parts[number :: len(tables)])
        found.append(Found(keys, hold))
    return found


def _answer(
    ranks: Ranks, use: Use, tables: Sequence[_Table], messages: Sequence[Int64s]
) -> tuple[list[int], Int64s, list[Any]]:
    """(how many ids each rank asks for, their keys rank by rank, what holds their rows) of this rank's ids."""
    size = _HEAD * len(tables)
    heads = np.stack([each[:size].reshape(-1, _HEAD) for each in messages])
    bodies = [np.split(each[size:], np.cumsum(head[:, 0])[:-1]) for each, head in zip(messages, heads, strict=True)]
    keys, holds = [], []
    for number, each in enumerate(tables):
        counts, known = heads[:, number, 0], each.table.local.ids
        assert known is not None
        if use is Use.ADMIT:
            call = f"admission to {each.table.name}"
            num_ids, num_rows, num_candidates = heads[:, number, 1:].sum(0).tolist()
            most = num_rows + num_ids, num_candidates + num_ids
            known.peers = RankPeers(ranks, call, most, partial(each.send_positions, ranks, call))
        found = each.table.local.keys_of(np.concatenate([body[number] for body in bodies]), use)
        keys.append(np.split(found.keys, np.cumsum(counts)[:-1]))
        holds.append(found.hold)
    by_rank = np.concatenate([own for of_rank in zip(*keys, strict=True) for own in of_rank])
    return heads[:, :, 0].sum(1).tolist(), by_rank, holds


class DynamicLookupOverRanks(DynamicLookup):
    """Of a batch whose ids are other ranks' too. All calls are collective."""

    def __init__(self, batch: Any, *, mode: str, make: Callable[[Any], AnyLookup], owners: Owners) -> None:
        super().__init__(batch, mode=mode, make=make)
        self._ranks = owners.ranks

    def _joined(self, use: Use) -> AnyLookup:
        return self._joined_by(self._ranks, use)

    def _joined_by(self, ranks: Ranks, use: Use) -> AnyLookup:
        with ranks.telling():
            return self._make(with_rows(self._batch, partial(find_over_ranks, ranks, use)))

    def route(self, ranks: Ranks) -> None:
        """See ``ShardedLookup.route``."""
        known: Any = self._joined_by(ranks, Use.PREPARE)
        self._known = known
        known.route(ranks)
