"""The hot tier: rows in device memory, 32-way set-associative, on torch tensors.

A mixing hash gives each key one set of 32 slots. Finding a key reads 256 contiguous bytes; evicting looks at one set
only. Within a set the victim is exactly the least recently (or least frequently) used row.

Admission has two steps. ``plan`` names each row's slot and victim and changes nothing, so dirty victims can be written
back first. It depends only on the cache and the batch: rows of one set are planned one after another in the order
given. A row whose whole set is pinned is a *conflict miss* and gets no slot; if the caller gives access counts
(``FrequencySketch``), nor does a row used less often than its victim. ``commit`` can be launched right behind, before
the host has seen the plan: it does nothing if the plan's summary says that rows must be written back first or do not
fit. The host never learns U, the number of keys, beforehand.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, RESIDENT
from . import backend, cache_twin
from .batch import Groups
from .books import NO_SUCH_SLOT, PIN, SUMMARY_ROWS, WAYS, Books, Plan, Status, mixed, sets_of

PolicyName = Literal["lru", "lfu"]

INDEX_BYTES: Final = 20
"""Key, rank and flags of a slot."""
SUMMARY_BYTES: Final = 2 * SUMMARY_ROWS * len(Status) * 4
"""Of a plan and the next, of a cache."""
CAPACITY_MAX: Final = 2**31 - 2 * WAYS
"""Slots are int32, those behind the cache's included."""


class HbmCache:
    """Which rows are in device memory, in which slot. Tensors in and out; only where it is said the host waits.

    Args:
        capacity: slots, from 1 to ``CAPACITY_MAX`` with ``extra_rows``; sets have 32, the last one what is left.
        weight_words, state_words: 64-bit words of a row's weights and of its optimizer state.
        policy: "lru" or "lfu".
        device: where its tensors lie.
        extra_rows: rows of the arenas behind the cache's slots, for their owner's use.

    Attributes:
        weights, state: int64 [capacity + extra_rows, words], the rows.
        kernels: the module with the steps' kernels.
    """

    def __init__(
        self, capacity: int, *, weight_words: int, state_words: int, policy: PolicyName, device: torch.device,
        extra_rows: int = 0,
    ) -> None:  # fmt: skip
        self.capacity: Final = capacity
        rows = capacity + extra_rows
        self.weights = torch.empty((rows, weight_words), dtype=torch.int64, device=device)
        self.state = torch.empty((rows, state_words), dtype=torch.int64, device=device)
        self._is_lfu = policy == "lfu"
        self._books = Books.empty(capacity, device)
        self.kernels = backend.cache_kernels(device)
        self._clock = 0
        # The summaries of one plan and the next, which the commit in between sets to 0.
        self._summaries = torch.zeros((2, SUMMARY_ROWS, len(Status)), dtype=torch.int32, device=device)
        self._summary, self._following = self._summaries.unbind()
        self._is_ready = True

    @property
    def num_sets(self) -> int:
        return len(self._books.flags) // WAYS

    def locate(self, keys: Tensor) -> Tensor:
        """int32 [n]: each key's slot, or -1. Changes nothing; for checks, and slow."""
        return cache_twin.find(self._books, keys)

    def plan(
        self, keys: Tensor, num_unique: Tensor, *, lying: Tensor | None = None, counts: Tensor | None = None
    ) -> Plan:
        """Plan which slots a batch's rows take, and their victims. Changes nothing.

        Args:
            keys: int64 [N], N > 0; the first U are distinct, in order of their ``sets_of``; within a set, in the
                order to treat them.
            num_unique: int32 [1], U.
            lying: int32 [N]: of keys that lie behind the cache's slots, and take none, where; else -1. None for none.
            counts: int32 [N], how often each is asked for. By policy "lfu", a row does not enter where the row that
                would leave has a higher count, and enters with its own. None: every row enters, with a count of 1.
        """
        if not self._is_ready:
            self._summaries.zero_()
        self._is_ready = False
        self._summary, self._following = self._following, self._summary
        slots, statuses = self.kernels.plan(self._books, keys, num_unique, lying, counts, self._summary)
        return Plan(keys, slots, statuses, counts, self._summary)

    def commit(self, plan: Plan, *, forced: bool = False) -> None:
        """Carry out the last plan: evict, reserve, count an access, pin. Nothing else may have changed since then.
        Unless ``forced`` (dirty victims are clean by now, and keys without a slot are taken care of), nothing is
        done where the plan has a dirty victim, a conflict miss or a refused key."""
        clock, self._clock = self._clock, self._clock + len(plan.keys)
        self.kernels.commit(self._books, plan, self._following, clock, self._is_lfu, forced)
        self._is_ready = True

    def list_keys(self, plan: Plan, places: Tensor, told: Tensor) -> Tensor:
        """Slots, int32 [n] on the device, of some places (int64 [n]) of a plan. ``told``, int64 [2, n] and page-locked,
        gets their keys for the host, which then waits; and those of the rows that have their slots now, or, of a
        slot that is none of the cache's, its number."""
        slots: Tensor = self.kernels.list_keys(self._books, plan, places, self.capacity, told)
        return slots

    # Slots: int32 [n], distinct but for those below 0 and from the capacity on, which stay as they are

    def settle(self, slots: Tensor) -> None:
        """The rows of those of these slots that are loading are in place, as far as later work on this stream sees."""
        self._edit(slots, keep=~LOADING)

    def release(self, slots: Tensor, *, changed: bool) -> None:
        """Undo one pin of each slot, and note that its row is newer than the tier below if it changed."""
        self._edit(slots, unpin=True, add=DIRTY if changed else 0)

    def drop_loading(self, slots: Tensor) -> None:
        """Undo one pin of each slot, and forget those that are loading, which only one caller has pinned."""
        self._edit(slots, unpin=True, forget=True)

    def repin(self, leased: Sequence[Tensor]) -> None:
        """Have the slots of these leases pinned, each as often as it is in one, and no others; and forget what is
        loading. For slots as for ``release``."""
        flags = self._books.flags[: self.capacity]
        flags &= PIN - 1
        flags[flags & LOADING != 0] = 0
        for slots in leased:
            own = slots[(slots >= 0) & (slots < self.capacity)].long()
            flags.index_add_(0, own, torch.full_like(own, PIN, dtype=flags.dtype))

    def clean(self, slots: Tensor) -> None:
        """The rows of these slots were written to the tier below."""
        self._edit(slots, keep=~DIRTY)

    def _edit(self, slots: Tensor, *, unpin: bool = False, keep: int = -1, add: int = 0, forget: bool = False) -> None:
        flags = self._books.flags
        self.kernels.edit_flags(flags, slots, self.capacity, unpin=unpin, keep=keep, add=add, forget=forget)

    def warm_up(self) -> None:
        """Have the kernels compiled. Changes no row that is there."""
        device = self._books.flags.device
        keys = torch.zeros(1, dtype=torch.int64, device=device)
        none = torch.zeros(1, dtype=torch.int32, device=device)
        for lying in (None, none):
            for counts in (None, none) if self._is_lfu else (None,):
                plan = self.plan(keys, none, lying=lying, counts=counts)
                self.commit(plan)
        self.list_keys(plan, keys, torch.empty((2, 1), dtype=torch.int64, device=device))
        if self._is_lfu:
            self.age()
        for edit in (self.settle, self.drop_loading):
            edit(none - 1)

    def age(self) -> None:
        """Halve the counts of all rows (policy "lfu")."""
        self.kernels.age(self._books.ranks)

    def keys_at(self, slots: Tensor) -> Tensor:
        return self._books.keys[slots]

    def slots_with(self, flags: int) -> Tensor:
        """int32 [n], ascending: resident slots that have any of these flags. Waits for the device."""
        found: Tensor = torch.nonzero(self._books.flags & flags).flatten().to(torch.int32)
        return found

    def clear(self) -> None:
        """Forget every row that is neither pinned nor newer than the tier below."""
        flags = self._books.flags
        flags[(flags < PIN) & (flags & DIRTY == 0)] = 0

    @property
    def num_pinned(self) -> int:
        return int((self._books.flags[: self.capacity] >= PIN).sum())

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weights, self.state, self._summaries, *self._books))

    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold: each resident key lies in its own set,
        and once; a slot that is not resident has no flag and no pin; a loading slot is pinned and clean; ranks are of
        accesses that happened, and distinct. Waits for the device."""
        flags = self._books.flags.cpu()
        flags, beyond = flags[: self.capacity], flags[self.capacity :]
        resident = flags & RESIDENT != 0
        slots = torch.nonzero(resident).flatten()
        keys, ranks = self._books.keys.cpu()[slots], self._books.ranks.cpu()[slots]
        loading = flags[flags & LOADING != 0]
        faults = {
            "outside their set": sets_of(mixed(keys), self.num_sets) != slots // WAYS,
            "keys twice": torch.ones(len(keys) - len(set(keys.tolist()))),
            "ranks twice": torch.ones(len(ranks) - len(set(ranks.tolist()))),
            "free slots with flags or pins": flags[~resident] != 0,
            "loading unpinned or dirty": (loading < PIN) | (loading & DIRTY != 0),
            f"used later than the clock {self._clock}": ranks & cache_twin.STAMP_MASK > self._clock,
            "changed beyond the capacity": beyond != NO_SUCH_SLOT,
        }
        counts = {name: int(wrong.sum()) for name, wrong in faults.items()}
        assert not any(counts.values()), f"of {self.capacity} slots {len(slots)} are resident: {counts}"


_WIDTH: Final = 8
"""Counters of a row of the sketch, for each cached row."""
_ROWS: Final = 2
SKETCH_BYTES: Final = _WIDTH * _ROWS * 2
"""For each cached row."""
MAX_ESTIMATE: Final = 30_000
PERIOD: Final = 50
"""Accesses, for each cached row, between two halvings. Widths and periods were tried on Criteo's lookups: half the
width costs 0.5 to 0.8 points of hit rate, a fifth of the period 1."""


class FrequencySketch:
    """Recent access counts of keys. Too high where keys share counters; too low only by halving."""

    def __init__(self, capacity: int, device: torch.device, kernels: ModuleType) -> None:
        self._period = PERIOD * capacity
        self._counters = torch.zeros(_ROWS * _WIDTH * capacity, dtype=torch.int16, device=device)
        self._kernels = kernels
        self._accesses = 0

    def count(self, keys: Tensor, num_unique: Tensor, known: int) -> None:
        """Count one access of each of the first U keys (int64 [n], distinct); ``known``: U, on the host."""
        self._kernels.sketch_count(self._counters, keys, num_unique, MAX_ESTIMATE)
        self._accesses += known

    def estimate(self, keys: Tensor, num_unique: Tensor) -> Tensor:
        """int32 [n]: accesses of each of the first U keys, the current one included."""
        estimates: Tensor = self._kernels.sketch_estimate(self._counters, keys, num_unique)
        return estimates

    def age(self) -> bool:
        """Halve the counts if it is time. A caller that compares them with its own counts must then halve those too."""
        if self._accesses < self._period:
            return False
        self._accesses //= 2
        self._counters >>= 1
        return True

    def warm_up(self) -> None:
        """Have the kernels compiled. Changes nothing."""
        keys = torch.zeros(1, dtype=torch.int64, device=self._counters.device)
        none = torch.zeros(1, dtype=torch.int32, device=self._counters.device)
        self.estimate(keys, none)
        self.count(keys, none, 0)

    @property
    def size_bytes(self) -> int:
        return self._counters.nbytes


class Grouping(NamedTuple):
    """A batch of N keys, U distinct.

    Attributes:
        keys: int64 [N]; the first U are the distinct keys, in order of their cache sets.
        inverse: int32 [N], which of the distinct keys each position has.
        groups: the positions of each distinct key.
    """

    keys: Tensor
    inverse: Tensor
    groups: Groups


def group_keys(keys: Tensor) -> Grouping:
    """Group int64 [N] by key, N > 0. Keys are sorted by ``books.mixed``, so keys of a set are neighbours."""
    kernels = backend.cache_kernels(keys.device)
    ordered, order = torch.sort(kernels.mix_keys(keys), stable=True)
    distinct, starts, num_unique, inverse = kernels.place_starts(ordered, order, keys)
    return Grouping(distinct, inverse, Groups(order, starts, num_unique))


def group_slots(slots: Tensor) -> tuple[Tensor, Groups]:
    """Group int32 [N] by slot, N > 0: int32 [N], whose first U are the distinct slots, ascending; and the groups."""
    kernels = backend.cache_kernels(slots.device)
    ordered, order = torch.sort(slots, stable=True)
    distinct, starts, num_unique, _ = kernels.place_starts(ordered, order, None)
    return distinct, Groups(order, starts, num_unique)


def warm_up(device: torch.device) -> None:
    group_keys(torch.zeros(1, dtype=torch.int64, device=device))
    group_slots(torch.zeros(1, dtype=torch.int32, device=device))
