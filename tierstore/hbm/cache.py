"""Which rows are in device memory, in which slot: a 32-way set-associative cache on torch tensors, and overflow slots.

A mixing hash gives each key one set of 32 slots. Finding a key reads 256 contiguous bytes; evicting looks at one set
only. Within a set the victim is exactly the least recently (or least frequently) used row.

Admission has two steps. ``plan`` names each row's slot and victim and changes nothing, so dirty victims can be written
back first. It depends only on the cache and the batch: rows of one set are planned one after another in the order
given. A row whose whole set is pinned is a *conflict miss* and gets no slot. ``commit`` can be launched right behind,
before the host has seen the plan: it does nothing if the plan's summary says that rows must be written back first or do
not fit. The host never learns U, the number of keys, beforehand.

A row all of whose set is in use may take any *overflow* slot; the host keeps which one has it.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, RESIDENT, Admission, AdmitStatus
from ..cache.cache_state import Tally
from ..cache.ddr import DdrCache, size_bytes_of
from ..kernels.arrays import Int32s, Int64s
from ..layout import RowLayout
from . import kernel_types as types
from .kernel_types import NUM_STATUSES, PIN, SUMMARY_ROWS, WAYS, CacheState, Groups, Plan, mixed, sets_of
from .streams import Sender, staging_bytes

PolicyName = Literal["lru", "lfu"]

INDEX_BYTES: Final = 20  # key, rank and flags of a slot
SUMMARY_BYTES: Final = 2 * SUMMARY_ROWS * NUM_STATUSES * 4  # of a plan and the next
OVERFLOW_INDEX_BYTES: Final = 3 * 8  # an overflow slot: its key, the same sorted, and the slot of the sorted one
CAPACITY_MAX: Final = 2**31 - 2 * WAYS  # slots are int32, those behind the cache's included
PERIOD: Final = 50  # keys, for each slot, between two halvings of access counts (policy "lfu")
_NOBODY: Final = -1  # no key of a row is negative


class HbmSize(NamedTuple):
    """Rows of one pool in device memory. Without overflow, every row has its slot."""

    cached_rows: int
    overflow_rows: int
    staging_rows: int  # of each buffer

    def host_bytes(self, layout: RowLayout) -> int:
        overflow = self.overflow_rows and size_bytes_of("lru", self.overflow_rows, weight_words=0, state_words=0)
        return staging_bytes(layout, self.staging_rows) + overflow


def kernels_of(device: torch.device) -> ModuleType:
    """``launches``, or for the CPU ``twin``."""
    if device.type == "cuda":
        from . import launches

        return launches
    from . import twin

    return twin


class HbmCache:
    """Tensors in and out; only where it is said the host waits. ``capacity``: slots, from 1 to ``CAPACITY_MAX``; sets
    have 32, the last one what is left. Methods that take slots, int32 [n], distinct, leave those below 0 and from the
    capacity on as they are."""

    def __init__(self, capacity: int, *, policy: PolicyName, device: torch.device) -> None:
        self.capacity: Final = capacity
        self._is_lfu = policy == "lfu"
        self._cache_state = CacheState.empty(capacity, device)
        self._kernels = kernels_of(device)
        self._clock = 0
        # The summaries of one plan and the next, which the commit in between sets to 0.
        self._summaries = torch.zeros((2, SUMMARY_ROWS, NUM_STATUSES), dtype=torch.int32, device=device)
        self._summary, self._following = self._summaries.unbind()
        self._is_ready = True

    @property
    def num_sets(self) -> int:
        return len(self._cache_state.flags) // WAYS

    def locate(self, keys: Tensor) -> Tensor:
        """int32 [n]: each key's slot, or -1; slow."""
        slots = sets_of(mixed(keys), self.num_sets).long()[:, None] * WAYS + torch.arange(WAYS, device=keys.device)
        same = (self._cache_state.flags[slots] & RESIDENT != 0) & (self._cache_state.keys[slots] == keys[:, None])
        return torch.where(same.any(1), slots[:, 0] + same.to(torch.int8).argmax(1), -1).to(torch.int32)

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
        slots, statuses = self._kernels.plan(self._cache_state, keys, num_unique, lying, self._summary)
        return Plan(keys, slots, statuses, self._summary)

    def commit(self, plan: Plan, *, forced: bool = False) -> None:
        """Carry out the last plan: evict, reserve, count an access, pin. Nothing else may have changed since then.
        Unless ``forced`` (dirty victims are clean by now, and keys without a slot are taken care of), nothing is
        done where the plan has a dirty victim or a conflict miss."""
        clock, self._clock = self._clock, self._clock + len(plan.keys)
        self._kernels.commit(self._cache_state, plan, self._following, clock, self._is_lfu, forced)
        self._is_ready = True
        period = PERIOD * self.capacity
        if self._is_lfu and clock // period < self._clock // period:
            self.age()

    def list_keys(self, plan: Plan, places: Tensor, listed: Tensor) -> Tensor:
        """Slots, int32 [n] on the device, of some places (int64 [n]) of a plan. ``listed``, int64 [2, n], page-locked,
        gets their keys for the host, which then waits; and those of the rows that have their slots now, or, of a slot
        that is none of the cache's, its number."""
        slots: Tensor = self._kernels.list_keys(self._cache_state, plan, places, self.capacity, listed)
        return slots

    def settle(self, slots: Tensor) -> None:
        """The rows of those of these slots that are loading are in place, as far as later work on this stream sees."""
        self._edit(slots, keep=~LOADING)

    def release(self, slots: Tensor, *, changed: bool) -> None:
        """Undo one pin of each slot, and note that its row is newer than the tier below if it changed."""
        self._edit(slots, unpin=True, add=DIRTY if changed else 0)

    def repin(self, leased: Sequence[Tensor]) -> None:
        """Have the slots of these leases pinned, each as often as it is in one, and no others; and forget what is
        loading."""
        flags = self._cache_state.flags[: self.capacity]
        flags &= PIN - 1
        flags[flags & LOADING != 0] = 0
        for slots in leased:
            own = slots[(slots >= 0) & (slots < self.capacity)].long()
            flags.index_add_(0, own, torch.full_like(own, PIN, dtype=flags.dtype))

    def clean(self, slots: Tensor) -> None:
        self._edit(slots, keep=~DIRTY)

    def _edit(self, slots: Tensor, *, unpin: bool = False, keep: int = -1, add: int = 0) -> None:
        self._kernels.edit_flags(self._cache_state.flags, slots, self.capacity, unpin=unpin, keep=keep, add=add)

    def age(self) -> None:
        """Halve the counts of all rows (policy "lfu")."""
        self._kernels.age(self._cache_state.ranks)

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
        return sum(tensor.nbytes for tensor in (self._summaries, *self._cache_state))

    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold. Waits for the device."""
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
            f"used later than the clock {self._clock}": ranks & types.STAMP_MASK > self._clock,
            "changed beyond the capacity": beyond != types.NO_SUCH_SLOT,
        }
        counts = {name: int(wrong.sum()) for name, wrong in faults.items()}
        assert not any(counts.values()), f"of {self.capacity} slots {len(slots)} are resident: {counts}"


class Overflow(DdrCache):
    """Which rows have overflow slots, least recently used first to go: a cache without rows, known to the device, whose
    slots are ``behind`` others in the arenas. Rows enter by ``enter`` and go by ``forget``, which update the device.
    Nothing waits for it."""

    def __init__(self, capacity: int, *, behind: int, sender: Sender) -> None:
        super().__init__(capacity, weight_words=0, state_words=0, policy="lru")
        self.behind = behind
        self._sender = sender
        self._kernels = kernels_of(sender.device)
        self._keys = torch.full((capacity,), _NOBODY, dtype=torch.int64, device=sender.device)
        self._ordered: tuple[Tensor, Tensor] | None = None  # keys sorted, and their slots; None after a change

    def locate(self, keys: Tensor) -> Tensor | None:
        """int32 [n], on the keys' device: each key's slot of the arenas or -1. None if no key can have one."""
        if not self.num_resident:
            return None
        if self._ordered is None:
            self._ordered = torch.sort(self._keys)
        found: Tensor = self._kernels.find_sorted(*self._ordered, keys, self.behind)
        return found

    def places(self, slots: Int32s) -> Tensor:
        """int32 [n], on the device: slots of the arenas."""
        (places,), _ = self._sender.copy(slots + np.int32(self.behind))
        return places

    def enter(self, keys: Int64s, make_room: Callable[[Int32s], None]) -> Admission | None:
        """Give each of the keys (int64 [n], distinct, none with a slot) one, pinned and loading. None if there are too
        few: nothing changed but what ``make_room`` wrote down, of dirty slots that nobody uses."""
        admission = Admission(keys)
        if not len(keys):
            return admission
        while (status := self.admit(admission)) is AdmitStatus.DIRTY_VICTIM:
            leaving = self.dirty_victims(self.capacity, self.capacity)
            make_room(leaving)
            self.clean(leaving)
        slots, entered = admission.slots, admission.keys[: admission.num_unique]
        if status is AdmitStatus.ALL_PINNED:
            self.release(admission)
            # Rows that left for these are gone.
            self._note(slots[self.find(entered) < 0], _NOBODY)
            return None
        self._note(slots, entered)
        return admission

    def _note(self, slots: Int32s, keys: Int64s | int) -> None:
        """Tell the device whose slots these are."""
        (places, owners), _ = self._sender.copy(slots.astype(np.int64), np.full(len(slots), keys, np.int64))
        self._keys.index_copy_(0, places, owners)
        self._ordered = None

    def repin(self, leased: Sequence[Int32s]) -> None:
        """As of ``HbmCache``. The device gets all again."""
        self.pins[:] = 0
        self.tallies[Tally.PINNED] = 0
        for slots in leased:
            self.pin(slots)
        resident = self.resident_slots()
        self.evict(resident[(self.flags[resident] & LOADING) != 0])
        self._keys.fill_(_NOBODY)
        resident = self.resident_slots()
        self._note(resident, self.keys_of(resident))

    def forget(self) -> None:
        """Forget every row; none is pinned or newer."""
        slots = self.resident_slots()
        self.evict(slots)
        self._note(slots, _NOBODY)

    def check_integrity(self) -> None:
        super().check_integrity()
        slots, keys = self.resident_slots(), self._keys.cpu().numpy()
        assert not self.is_loading(slots), "an overflow slot is loading with nobody at it"
        known = int((keys != _NOBODY).sum())
        assert known == len(slots), f"{known} slots taken on the device, {len(slots)} on the host"
        assert np.array_equal(keys[slots], self.keys_of(slots)), "the device's keys are not those of the host"


def group(rows: Tensor) -> Groups:
    """Group keys, int64 [N], or slots, int32 [N], N > 0. Keys are sorted mixed, so keys of a set are neighbours."""
    kernels, are_keys = kernels_of(rows.device), rows.dtype == torch.int64
    ordered, order = torch.sort(kernels.mix_keys(rows) if are_keys else rows, stable=True)
    made: Groups = kernels.place_starts(ordered, order, rows if are_keys else None)
    return made
