"""The hot tier: rows in device memory, 32-way set-associative, on torch tensors.

A mixing hash gives each key one set of 32 slots. Finding a key reads 256 contiguous bytes; evicting looks at one set
only. Within a set the victim is exactly the least recently (or least frequently) used row. The index takes 20 bytes a
cached row (``INDEX_BYTES``), whatever the tables' sizes.

Admission has two steps, ``plan`` and ``commit``. The plan names each row's slot and victim and changes nothing, so
dirty victims can be written back first. Rows of one set are planned one after another in the order given; sets are
independent. So a plan depends only on the cache and the batch. If a row's whole set is pinned, it is a *conflict miss*
and gets no slot. If the caller gives access counts (``hbm_sketch``), a row used less often than its victim gets none
either.

``HbmCache`` has the contract of ``base`` (numpy in, numpy out; waits for the device). It is built on steps over
tensors, which the pipeline calls and which never wait. The kernels are Triton's on CUDA (``hbm_triton``), torch's
elsewhere (``hbm_twin``).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.arrays import Bools, Int32s, Int64s
from . import hbm_twin
from .base import Admission, AdmitStatus, CacheCounters
from .flags import DIRTY, FROZEN, LOADING, RESIDENT
from .hbm_books import NO_SUCH_SLOT, PIN, STAMP_BITS, WAYS, Books, Plan, Status, mixed, sets_of

__all__ = ["CAPACITY_MAX", "INDEX_BYTES", "HbmCache", "PolicyName"]

PolicyName = Literal["lru", "lfu"]

INDEX_BYTES: Final = 20
"""Key, rank and flags of a slot."""
CAPACITY_MAX: Final = 2**31 - 2 * WAYS
"""Slots are int32, those behind the cache's included."""
_FLAG_NAMES: Final = {RESIDENT: "resident", DIRTY: "dirty", FROZEN: "frozen", LOADING: "loading"}


class _Numbering(NamedTuple):
    """A batch's distinct keys in order of first use."""

    keys: Int64s
    inverse: Int32s
    first_use: Int64s


def _number(keys: Int64s) -> _Numbering:
    distinct, first_use, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first_use)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return _Numbering(distinct[order], rank[inverse], first_use[order])


class HbmCache:
    """A ``RowCache`` in device memory.

    Args:
        capacity: slots, at least 1; sets have 32 slots, the last one what is left.
        weight_words, state_words: 64-bit words of a row's weights and of its optimizer state.
        policy: "lru" or "lfu".
        device: where its tensors lie.
        extra_rows: rows of the arenas behind the cache's slots, for their owner's use.

    Attributes:
        weights, state: int64 [capacity + extra_rows, words], the rows.

    Raises:
        ValueError: for any of them out of range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        weight_words: int,
        state_words: int,
        policy: PolicyName,
        device: torch.device,
        extra_rows: int = 0,
    ) -> None:
        if not 1 <= capacity <= CAPACITY_MAX - extra_rows:
            raise ValueError(f"capacity={capacity} is not from 1 to {CAPACITY_MAX - extra_rows}")
        if weight_words < 0 or state_words < 0:
            raise ValueError(f"weight_words={weight_words}, state_words={state_words}: neither may be negative")
        if policy not in get_args(PolicyName):
            raise ValueError(f'policy={policy!r} is neither "lru" nor "lfu"')
        self.policy: Final = policy
        self.device: Final = device
        self.capacity: Final = capacity
        rows = capacity + extra_rows
        self.weights = torch.empty((rows, weight_words), dtype=torch.int64, device=device)
        self.state = torch.empty((rows, state_words), dtype=torch.int64, device=device)
        self._books = Books.empty(capacity, device)
        self._kernels = _kernels_for(device)
        self._clock = 0
        self._admitting = 0
        self._lookups = self._hits = self._misses = self._evictions = 0

    # The pipeline's steps: tensors on the device, which nobody waits for

    @property
    def num_sets(self) -> int:
        return len(self._books.flags) // WAYS

    def locate(self, keys: Tensor) -> Tensor:
        """int32 [n]: each key's slot, or -1. Changes nothing."""
        slots: Tensor = self._kernels.find(self._books, keys, sets_of(mixed(keys), self.num_sets))
        return slots

    def plan(
        self,
        keys: Tensor,
        sets: Tensor,
        members: Tensor,
        *,
        taken: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Plan:
        """Plan which slots a batch's rows take, and their victims. Changes nothing.

        Args:
            keys: int64 [U], distinct.
            sets: int32 [U], ascending: ``sets_of`` the keys in the order of ``members``.
            members: int32 [U], numbers of keys by set; within a set, in the order to treat them.
            taken: bool [U], keys that lie elsewhere and take no slot; None for none.
            counts: int32 [U], how often each is asked for. By policy "lfu", a row does not enter where the row that
                would leave has a higher count, and enters with its own. None: every row enters, with a count of 1.
        """
        made: Plan = self._kernels.plan(self._books, keys, sets, members, taken, counts)
        return made

    def commit(self, keys: Tensor, plan: Plan, count: int) -> None:
        """Carry out the plan for the first ``count`` keys: evict, reserve, count an access, pin. Their victims must be
        clean, and nothing else may have changed since ``plan``."""
        self._kernels.commit(self._books, keys, plan, count, self._clock, self.policy == "lfu")
        self._clock += count

    def settle(self, slots: Tensor) -> None:
        """The rows of these loading slots (distinct) are in place, as far as later work on this stream sees."""
        self._books.flags[slots] &= ~LOADING

    def release(self, slots: Tensor, *, changed: bool) -> None:
        """Undo one pin of each slot (distinct), and note that its row is newer than the tier below if it changed."""
        flags = self._books.flags
        flags[slots] = (flags[slots] - PIN) | (DIRTY if changed else 0)

    def drop_loading(self, slots: Tensor) -> None:
        """Undo one pin of each slot (distinct), and forget those that are loading and now unpinned."""
        flags = self._books.flags
        left = flags[slots] - PIN
        flags[slots] = torch.where((left & LOADING != 0) & (left < PIN), 0, left)

    def clear_flag(self, slots: Tensor, flag: int) -> None:
        """Clear a flag of these slots (distinct)."""
        self._books.flags[slots] &= ~flag

    def age(self) -> None:
        """Halve the counts of all rows (policy "lfu")."""
        ranks = self._books.ranks
        counts = (ranks >> (STAMP_BITS + 1)).clamp(min=1)
        ranks.copy_((counts << STAMP_BITS) | (ranks & hbm_twin.STAMP_MASK))

    def count(self, *, lookups: int, hits: int, misses: int, evictions: int) -> None:
        """Add to the totals that ``counters`` gives."""
        self._lookups += lookups
        self._hits += hits
        self._misses += misses
        self._evictions += evictions

    def keys_at(self, slots: Tensor) -> Tensor:
        """int64 [n]: keys of resident slots."""
        return self._books.keys[slots]

    def slots_with(self, flags: int) -> Tensor:
        """int32 [n], ascending: resident slots that have any of these flags. Waits for the device."""
        found: Tensor = torch.nonzero(self._books.flags & flags).flatten().to(torch.int32)
        return found

    def clear(self) -> None:
        """Forget every row that is neither pinned nor newer than the tier below."""
        flags = self._books.flags
        idle = (flags < PIN) & (flags & (DIRTY | FROZEN) == 0)
        flags[idle] = 0

    # The contract

    @property
    def num_resident(self) -> int:
        return self._count(RESIDENT)

    @property
    def num_dirty(self) -> int:
        return self._count(DIRTY)

    @property
    def num_frozen(self) -> int:
        return self._count(FROZEN)

    @property
    def num_pinned(self) -> int:
        return int((self._books.flags[: self.capacity] >= PIN).sum())

    def _count(self, flag: int) -> int:
        return int((self._books.flags & flag != 0).sum())

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weights, self.state, *self._books))

    def counters(self) -> CacheCounters:
        return CacheCounters(lookups=self._lookups, hits=self._hits, misses=self._misses, evictions=self._evictions)

    def find(self, keys: Int64s) -> Int32s:
        found: Int32s = self.locate(self._send(keys)).cpu().numpy()
        return found

    def is_loading(self, slots: Int32s) -> bool:
        return bool((self._flags_of(slots) & LOADING).any())

    def touch(self, slots: Int32s) -> None:
        self._require(slots, "touch", "resident", lambda flags: flags & RESIDENT != 0)
        distinct = list(dict.fromkeys(slots.tolist()))
        for slot in distinct:
            self._clock += 1
            self._books.ranks[slot] = self._rank_after_access(int(self._books.ranks[slot]))
        self.count(lookups=len(slots), hits=len(distinct), misses=0, evictions=0)

    def _rank_after_access(self, rank: int) -> int:
        return int(hbm_twin.touched(torch.tensor(rank, device="cpu"), self._clock, self.policy == "lfu"))

    def admit(self, admission: Admission) -> AdmitStatus:
        if admission.stamp < 0:
            self._admitting += 1
            admission.stamp = self._admitting
        assert admission.stamp == self._admitting, "another admission ran between the calls of one"
        numbering = _number(admission.keys)
        known = admission.num_unique
        status, slots, statuses, count = self._admit_new(numbering.keys[known:])
        admission.unique_slots[known : known + count] = slots
        missing = known + np.flatnonzero(statuses != Status.HIT).astype(np.int32)
        admission.missing[admission.num_missing : admission.num_missing + len(missing)] = missing
        admission.num_unique += count
        admission.num_missing += len(missing)
        before = admission.consumed
        complete = admission.num_unique == len(numbering.keys)
        stop = len(admission.keys) if complete else int(numbering.first_use[admission.num_unique])
        admission.inverse[before:stop] = numbering.inverse[before:stop]
        admission.consumed = stop
        self.count(
            lookups=stop - before,
            hits=count - len(missing),
            misses=len(missing),
            evictions=int((statuses == Status.CLEAN_VICTIM).sum()),
        )
        return status

    def _admit_new(self, keys: Int64s) -> tuple[AdmitStatus, Int32s, NDArray[np.int8], int]:
        """Admit distinct keys in order as far as they go: (why it stopped, slots, statuses, how many)."""
        sent = self._send(keys)
        sets = sets_of(mixed(sent), self.num_sets)
        members = torch.argsort(sets, stable=True)
        plan = self.plan(sent, sets[members], members.to(torch.int32))
        statuses: NDArray[np.int8] = plan.statuses.cpu().numpy()
        stops = np.flatnonzero(statuses >= Status.DIRTY_VICTIM)
        count = int(stops[0]) if len(stops) else len(keys)
        self.commit(sent, plan, count)
        status = AdmitStatus.COMPLETE
        if len(stops):
            dirty = statuses[count] == Status.DIRTY_VICTIM
            status = AdmitStatus.DIRTY_VICTIM if dirty else AdmitStatus.ALL_PINNED
        return status, plan.slots.cpu().numpy()[:count], statuses[:count], count

    def filled(self, slots: Int32s) -> None:
        self._require(slots, "fill", "loading", lambda flags: flags & LOADING != 0)
        self.settle(self._send(slots))

    def abandon(self, admission: Admission) -> None:
        self.drop_loading(self._send(admission.slots))
        admission.consumed = admission.num_unique = admission.num_missing = 0
        admission.stamp = -1

    def pin(self, slots: Int32s) -> None:
        self._require(slots, "pin", "resident", lambda flags: flags & RESIDENT != 0)
        self._books.flags[self._send(slots)] += PIN

    def unpin(self, slots: Int32s) -> None:
        self._require(
            slots,
            "unpin",
            "pinned, and filled by its last unpin",
            lambda flags: (flags >= PIN) & ((flags & LOADING == 0) | (flags >= 2 * PIN)),
        )
        self.release(self._send(slots), changed=False)

    def mark_dirty(self, slots: Int32s) -> None:
        self._require(
            slots,
            "mark dirty",
            "resident, not loading, not frozen",
            lambda flags: flags & (RESIDENT | LOADING | FROZEN) == RESIDENT,
        )
        self._books.flags[self._send(slots)] |= DIRTY

    def victims(self, count: int, gap: int) -> Int32s:  # noqa: ARG002 - it knows no order for that
        """Unpinned dirty or frozen slots, lowest rank first, at most ``count``: the next victim depends on the set."""
        slots = self.slots_with(DIRTY | FROZEN)
        return self._by_rank(slots[self._books.flags[slots] < PIN])[:count]

    def by_admission(self, slots: Int32s) -> Int32s:
        return slots

    def clean(self, slots: Int32s) -> Int32s:
        return self._clear(slots, DIRTY)

    def thaw(self, slots: Int32s) -> Int32s:
        return self._clear(slots, FROZEN)

    def _clear(self, slots: Int32s, flag: int) -> Int32s:
        found = self._having(slots, flag)
        self.clear_flag(self._send(found), flag)
        return found

    def _having(self, slots: Int32s, flag: int) -> Int32s:
        found: Int32s = slots[self._flags_of(slots) & flag != 0]
        return found

    def frozen_of(self, slots: Int32s) -> Int32s:
        return self._having(slots, FROZEN)

    def freeze(self) -> None:
        assert not self.num_frozen, f"{self.num_frozen} slots are frozen already"
        self._move(DIRTY, FROZEN)

    def unfreeze(self) -> None:
        self._move(FROZEN, DIRTY)

    def _move(self, source: int, target: int) -> None:
        flags = self._books.flags
        flags.copy_(torch.where(flags & source != 0, (flags & ~source) | target, flags))

    def dirty_slots(self) -> Int32s:
        found: Int32s = self.slots_with(DIRTY).cpu().numpy()
        return found

    def frozen_slots(self) -> Int32s:
        found: Int32s = self.slots_with(FROZEN).cpu().numpy()
        return found

    def keys_of(self, slots: Int32s) -> Int64s:
        self._require(slots, "give the key of", "resident", lambda flags: flags & RESIDENT != 0)
        keys: Int64s = self.keys_at(self._send(slots)).cpu().numpy()
        return keys

    def resident_slots(self) -> Int32s:
        return self._by_rank(self.slots_with(RESIDENT))

    def _by_rank(self, slots: Tensor) -> Int32s:
        ordered: Int32s = slots[torch.argsort(self._books.ranks[slots])].cpu().numpy()
        return ordered

    def evict(self, slots: Int32s) -> None:
        self._require(slots, "evict", "resident, clean and unpinned", lambda flags: flags == RESIDENT)
        self._books.flags[self._send(slots)] = 0
        self.count(lookups=0, hits=0, misses=0, evictions=len(slots))

    def access(self, keys: Int64s) -> Bools:
        unclean = self.num_dirty + self.num_frozen
        assert self.num_pinned == unclean == 0, f"replay with {self.num_pinned} pinned, {unclean} dirty"
        is_hit = np.empty(len(keys), np.bool_)
        for position in range(len(keys)):
            admission = Admission(keys[position : position + 1])
            self.admit(admission)
            is_hit[position] = not admission.num_missing
            self.settle(self._send(admission.slots))
            self.unpin(admission.slots)
        return is_hit

    def check_integrity(self) -> None:
        """AssertionError, with every term, unless the conservation laws hold: each resident key lies in its own set,
        and once; a slot that is not resident has no flag and no pin; a loading slot is pinned, neither dirty nor
        frozen; no slot is dirty and frozen; ranks are of accesses that happened, and distinct."""
        flags = self._books.flags[: self.capacity].cpu()
        resident = flags & RESIDENT != 0
        slots = torch.nonzero(resident).flatten()
        keys, ranks = self._books.keys.cpu()[slots], self._books.ranks.cpu()[slots]
        own = sets_of(mixed(keys), self.num_sets)
        strays = int((own != slots // WAYS).sum())
        twice = len(keys) - _distinct(keys), len(ranks) - _distinct(ranks)
        free = flags[~resident]
        loading = flags[flags & LOADING != 0]
        bad_loading = int(((loading < PIN) | (loading & (DIRTY | FROZEN) != 0)).sum())
        both = int(((flags & DIRTY != 0) & (flags & FROZEN != 0)).sum())
        late = int((ranks & hbm_twin.STAMP_MASK > self._clock).sum())
        beyond = self._books.flags[self.capacity :]
        terms = (strays, *twice, int((free != 0).sum()), bad_loading, both, late, int((beyond != NO_SUCH_SLOT).sum()))
        assert not any(terms), (
            f"of {self.capacity} slots {len(slots)} are resident: {strays} outside their set, {twice[0]} keys and "
            f"{twice[1]} ranks twice, {terms[3]} free slots with flags or pins, {bad_loading} loading unpinned or "
            f"dirty, {both} dirty and frozen, {late} used later than the clock {self._clock}, {terms[7]} changed "
            "beyond the capacity"
        )

    # Numpy to the device and back, checked

    def _send(self, array: "NDArray[Any]") -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _flags_of(self, slots: Int32s) -> Int32s:
        flags: Int32s = self._books.flags[self._send(slots)].cpu().numpy()
        return flags

    def _require(self, slots: Int32s, action: str, condition: str, holds: Callable[[Int32s], Bools]) -> None:
        outside = (slots < 0) | (slots >= self.capacity)
        if outside.any():
            raise AssertionError(f"cannot {action} slot {slots[outside.argmax()]}: the cache has {self.capacity} slots")
        flags = self._flags_of(slots)
        wrong = ~holds(flags)
        if wrong.any():
            place = int(wrong.argmax())
            names = [name for flag, name in _FLAG_NAMES.items() if flags[place] & flag]
            raise AssertionError(
                f"cannot {action} slot {slots[place]}: it must be {condition}; it is {', '.join(names) or 'free'}, "
                f"pinned {flags[place] // PIN} times"
            )


def _distinct(values: Tensor) -> int:
    return len(np.unique(values.numpy()))


def _kernels_for(device: torch.device) -> ModuleType:
    """The module with the steps' kernels."""
    if device.type != "cuda":
        return hbm_twin
    from . import hbm_triton

    return hbm_triton
