"""The hot tier: rows in device memory, 32-way set-associative, on torch tensors.

A mixing hash gives each key one set of 32 slots. Finding a key reads 256 contiguous bytes; evicting looks at one set
only. Within a set the victim is exactly the least recently (or least frequently) used row. The index takes 20 bytes a
cached row (``INDEX_BYTES``), whatever the tables' sizes.

Admission has two steps, ``plan`` and ``commit``. The plan names each row's slot and victim and changes nothing, so
dirty victims can be written back first. Rows of one set are planned one after another in the order given; sets are
independent. So a plan depends only on the cache and the batch. If a row's whole set is pinned, it is a *conflict miss*
and gets no slot. If the caller gives access counts (``hbm_sketch``), a row used less often than its victim gets none
either.

The kernels are Triton's on CUDA (``hbm_triton``), torch's elsewhere (``hbm_twin``).
"""

from types import ModuleType
from typing import Final, Literal

import torch
from torch import Tensor

from . import hbm_twin
from .flags import DIRTY, LOADING, RESIDENT
from .hbm_books import NO_SUCH_SLOT, PIN, STAMP_BITS, WAYS, Books, Plan, mixed, sets_of

PolicyName = Literal["lru", "lfu"]

INDEX_BYTES: Final = 20
"""Key, rank and flags of a slot."""
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
        self.capacity: Final = capacity
        rows = capacity + extra_rows
        self.weights = torch.empty((rows, weight_words), dtype=torch.int64, device=device)
        self.state = torch.empty((rows, state_words), dtype=torch.int64, device=device)
        self._is_lfu = policy == "lfu"
        self._books = Books.empty(capacity, device)
        self._kernels = _kernels_for(device)
        self._clock = 0

    @property
    def num_sets(self) -> int:
        return len(self._books.flags) // WAYS

    def locate(self, keys: Tensor) -> Tensor:
        """int32 [n]: each key's slot, or -1. Changes nothing."""
        slots: Tensor = self._kernels.find(self._books, keys, sets_of(mixed(keys), self.num_sets))
        return slots

    def plan(self, keys: Tensor, sets: Tensor, *, taken: Tensor | None = None, counts: Tensor | None = None) -> Plan:
        """Plan which slots a batch's rows take, and their victims. Changes nothing.

        Args:
            keys: int64 [U], distinct, by set; within a set, in the order to treat them.
            sets: int32 [U], ascending: ``sets_of`` the keys.
            taken: bool [U], keys that lie elsewhere and take no slot; None for none.
            counts: int32 [U], how often each is asked for. By policy "lfu", a row does not enter where the row that
                would leave has a higher count, and enters with its own. None: every row enters, with a count of 1.
        """
        made: Plan = self._kernels.plan(self._books, keys, sets, taken, counts)
        return made

    def commit(self, keys: Tensor, plan: Plan) -> None:
        """Carry out the plan: evict, reserve, count an access, pin. The victims must be clean, and nothing else may
        have changed since ``plan``."""
        self._kernels.commit(self._books, keys, plan, self._clock, self._is_lfu)
        self._clock += len(keys)

    def settle(self, slots: Tensor) -> None:
        """The rows of these loading slots (distinct) are in place, as far as later work on this stream sees."""
        self._books.flags[slots] &= ~LOADING

    def release(self, slots: Tensor, *, changed: bool) -> None:
        """Undo one pin of each slot (distinct), and note that its row is newer than the tier below if it changed."""
        flags = self._books.flags
        flags[slots] = (flags[slots] - PIN) | (DIRTY if changed else 0)

    def drop_loading(self, slots: Tensor) -> None:
        """Undo one pin of each slot (distinct), and forget those that are loading, which only one caller has pinned."""
        flags = self._books.flags
        left = flags[slots] - PIN
        flags[slots] = torch.where(left & LOADING != 0, 0, left)

    def clean(self, slots: Tensor) -> None:
        """The rows of these slots (distinct) were written to the tier below."""
        self._books.flags[slots] &= ~DIRTY

    def age(self) -> None:
        """Halve the counts of all rows (policy "lfu")."""
        ranks = self._books.ranks
        counts = (ranks >> (STAMP_BITS + 1)).clamp(min=1)
        ranks.copy_((counts << STAMP_BITS) | (ranks & hbm_twin.STAMP_MASK))

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
        flags[(flags < PIN) & (flags & DIRTY == 0)] = 0

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned; waits for the device."""
        return int((self._books.flags[: self.capacity] >= PIN).sum())

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weights, self.state, *self._books))

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
            f"used later than the clock {self._clock}": ranks & hbm_twin.STAMP_MASK > self._clock,
            "changed beyond the capacity": beyond != NO_SUCH_SLOT,
        }
        counts = {name: int(wrong.sum()) for name, wrong in faults.items()}
        assert not any(counts.values()), f"of {self.capacity} slots {len(slots)} are resident: {counts}"


def _kernels_for(device: torch.device) -> ModuleType:
    """The module with the steps' kernels."""
    if device.type != "cuda":
        return hbm_twin
    from . import hbm_triton

    return hbm_triton
