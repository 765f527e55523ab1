"""The hot tier: rows in device memory, 32-way set-associative, on torch tensors.

A mixing hash gives each key one set of 32 slots. Finding a key reads 256 contiguous bytes; evicting looks at one set
only. Within a set the victim is exactly the least recently (or least frequently) used row.

Admission has two steps. ``plan`` names each row's slot and victim and changes nothing, so dirty victims can be written
back first. It depends only on the cache and the batch: rows of one set are planned one after another in the order
given. A row whose whole set is pinned is a *conflict miss* and gets no slot. ``commit`` can be launched right behind,
before the host has seen the plan: it does nothing if the plan's summary says that rows must be written back first or do
not fit. The host never learns U, the number of keys, beforehand.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, RESIDENT
from . import backend, cache_twin
from .batch import Groups
from .cache_state import NO_SUCH_SLOT, NUM_STATUSES, PIN, SUMMARY_ROWS, WAYS, CacheState, Plan, mixed, sets_of

PolicyName = Literal["lru", "lfu"]

INDEX_BYTES: Final = 20
"""Key, rank and flags of a slot."""
SUMMARY_BYTES: Final = 2 * SUMMARY_ROWS * NUM_STATUSES * 4
"""Of a plan and the next, of a cache."""
CAPACITY_MAX: Final = 2**31 - 2 * WAYS
"""Slots are int32, those behind the cache's included."""
PERIOD: Final = 50
"""Keys, for each slot, between two halvings of access counts (policy "lfu")."""


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
        self._cache_state = CacheState.empty(capacity, device)
        self.kernels = backend.cache_kernels(device)
        self._clock = 0
        # The summaries of one plan and the next, which the commit in between sets to 0.
        self._summaries = torch.zeros((2, SUMMARY_ROWS, NUM_STATUSES), dtype=torch.int32, device=device)
        self._summary, self._following = self._summaries.unbind()
        self._is_ready = True

    @property
    def num_sets(self) -> int:
        return len(self._cache_state.flags) // WAYS

    def locate(self, keys: Tensor) -> Tensor:
        """int32 [n]: each key's slot, or -1. Changes nothing; for checks, and slow."""
        return cache_twin.find(self._cache_state, keys)

    def plan(self, keys: Tensor, num_unique: Tensor, *, lying: Tensor | None = None) -> Plan:
        """Plan which slots a batch's rows take, and their victims. Changes nothing.

        Args:
            keys: int64 [N], N > 0; the first U are distinct, in order of their ``sets_of``; within a set, in the
                order to treat them.
            num_unique: int32 [1], U.
            lying: int32 [N]: of keys that lie behind the cache's slots, and take none, where; else -1. None for none.
        """
        if not self._is_ready:
            self._summaries.zero_()
        self._is_ready = False
        self._summary, self._following = self._following, self._summary
        slots, statuses = self.kernels.plan(self._cache_state, keys, num_unique, lying, self._summary)
        return Plan(keys, slots, statuses, self._summary)

    def commit(self, plan: Plan, *, forced: bool = False) -> None:
        """Carry out the last plan: evict, reserve, count an access, pin. Nothing else may have changed since then.
        Unless ``forced`` (dirty victims are clean by now, and keys without a slot are taken care of), nothing is
        done where the plan has a dirty victim or a conflict miss."""
        clock, self._clock = self._clock, self._clock + len(plan.keys)
        self.kernels.commit(self._cache_state, plan, self._following, clock, self._is_lfu, forced)
        self._is_ready = True
        period = PERIOD * self.capacity
        if self._is_lfu and clock // period < self._clock // period:
            self.age()

    def list_keys(self, plan: Plan, places: Tensor, listed: Tensor) -> Tensor:
        """Slots, int32 [n] on the device, of some places (int64 [n]) of a plan. ``listed``, int64 [2, n], page-locked,
        gets their keys for the host, which then waits; and those of the rows that have their slots now, or, of a slot
        that is none of the cache's, its number."""
        slots: Tensor = self.kernels.list_keys(self._cache_state, plan, places, self.capacity, listed)
        return slots

    # Slots: int32 [n], distinct but for those below 0 and from the capacity on, which stay as they are

    def settle(self, slots: Tensor) -> None:
        """The rows of those of these slots that are loading are in place, as far as later work on this stream sees."""
        self._edit(slots, keep=~LOADING)

    def release(self, slots: Tensor, *, changed: bool) -> None:
        """Undo one pin of each slot, and note that its row is newer than the tier below if it changed."""
        self._edit(slots, unpin=True, add=DIRTY if changed else 0)

    def repin(self, leased: Sequence[Tensor]) -> None:
        """Have the slots of these leases pinned, each as often as it is in one, and no others; and forget what is
        loading. For slots as for ``release``."""
        flags = self._cache_state.flags[: self.capacity]
        flags &= PIN - 1
        flags[flags & LOADING != 0] = 0
        for slots in leased:
            own = slots[(slots >= 0) & (slots < self.capacity)].long()
            flags.index_add_(0, own, torch.full_like(own, PIN, dtype=flags.dtype))

    def clean(self, slots: Tensor) -> None:
        """The rows of these slots were written to the tier below."""
        self._edit(slots, keep=~DIRTY)

    def _edit(self, slots: Tensor, *, unpin: bool = False, keep: int = -1, add: int = 0) -> None:
        self.kernels.edit_flags(self._cache_state.flags, slots, self.capacity, unpin=unpin, keep=keep, add=add)

    def age(self) -> None:
        """Halve the counts of all rows (policy "lfu")."""
        self.kernels.age(self._cache_state.ranks)

    def keys_at(self, slots: Tensor) -> Tensor:
        return self._cache_state.keys[slots]

    def slots_with(self, flags: int) -> Tensor:
        """int32 [n], ascending: resident slots that have any of these flags. Waits for the device."""
        found: Tensor = torch.nonzero(self._cache_state.flags & flags).flatten().to(torch.int32)
        return found

    def clear(self) -> None:
        """Forget every row that is neither pinned nor newer than the tier below."""
        flags = self._cache_state.flags
        flags[(flags < PIN) & (flags & DIRTY == 0)] = 0

    @property
    def num_pinned(self) -> int:
        return int((self._cache_state.flags[: self.capacity] >= PIN).sum())

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weights, self.state, self._summaries, *self._cache_state))

    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold: each resident key lies in its own set,
        and once; a slot that is not resident has no flag and no pin; a loading slot is pinned and clean; ranks are of
        accesses that happened, and distinct. Waits for the device."""
        flags = self._cache_state.flags.cpu()
        flags, beyond = flags[: self.capacity], flags[self.capacity :]
        resident = flags & RESIDENT != 0
        slots = torch.nonzero(resident).flatten()
        keys, ranks = self._cache_state.keys.cpu()[slots], self._cache_state.ranks.cpu()[slots]
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
    """Group int64 [N] by key, N > 0. Keys are sorted by ``cache_state.mixed``, so keys of a set are neighbours."""
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
