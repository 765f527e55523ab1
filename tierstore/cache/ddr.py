"""The warm tier: rows in host memory, evicted by exact LRU, exact LFU or TinyLFU.

Besides its rows a cache needs ``OVERHEAD_BYTES`` for each: 12 of index, 32 of slot record, with LFU 16 of buckets, with
TinyLFU 16 of sketch. And a cache of any size up to 500 bytes, with TinyLFU 37 KiB. Memory is taken from the system as
slots are first used.
"""

from typing import Any, Final, Literal, get_args

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s
from ..system.checks import require_int
from . import admission as kernels
from .base import NUM_UNIQUE, STAMP, Admission, AdmitStatus, Listing
from .cache_state import BUCKET_BYTES, CacheState, Tally, new_state, state_bytes_of
from .half_life import half_life_bytes_of, new_half_life
from .host_cache import NUMBER_MAX, HostCache, checked_keys, checked_slots, checked_starts, indexes, require_capacity
from .index import SLOT_DTYPE
from .integrity import check_state
from .policies import ranks_of
from .sketch import sketch_width

PolicyName = Literal["lru", "lfu", "tinylfu"]

INDEX_BYTES: Final = 12
OVERHEAD_BYTES: Final[dict[str, int]] = {
    "lru": INDEX_BYTES + SLOT_DTYPE.itemsize,
    "lfu": INDEX_BYTES + SLOT_DTYPE.itemsize + BUCKET_BYTES,
    "tinylfu": INDEX_BYTES + SLOT_DTYPE.itemsize + sketch_width(4) // 4,
}
"""Index and policy, in bytes per cached row."""
_STAMP_MAX: Final = 2**31 - 1
_HITS: Final = int(Tally.HITS)


def overhead_bytes_of(capacity: int, policy: PolicyName) -> int:
    """Bytes a ``DdrCache`` of this capacity allocates besides its rows."""
    return state_bytes_of(capacity, policy) + (half_life_bytes_of(capacity) if policy == "tinylfu" else 0)


class DdrCache(HostCache):
    """A ``RowCache`` in host memory.

    Args:
        capacity: slots, at least 1.
        weight_words: 64-bit words of weights a row; 0 for a cache without rows, to simulate.
        state_words: 64-bit words of optimizer state a row.
        policy: "lru", "lfu" or "tinylfu".

    Raises:
        ValueError: for any of them out of range.
    """

    def __init__(self, capacity: int, *, weight_words: int, state_words: int, policy: PolicyName) -> None:
        require_capacity(capacity)
        if policy not in get_args(PolicyName):
            raise ValueError(f"policy={policy!r} is none of {', '.join(get_args(PolicyName))}")
        self.policy: Final = policy
        self._cache_state: CacheState = new_state(capacity, policy)
        self._half_life = new_half_life(self._cache_state)
        slots = self._cache_state.slots[:-1]
        super().__init__(
            slots["flags"], slots["pins"], self._cache_state.tallies, weight_words=weight_words, state_words=state_words
        )

    @property
    def overhead_bytes(self) -> int:
        """Of ``size_bytes``, index and policy."""
        return overhead_bytes_of(self.capacity, self.policy)

    def find(self, keys: Int64s) -> Int32s:
        keys = checked_keys(keys)
        found: Int32s = np.empty(len(keys), np.int32)
        kernels.find_keys(self._cache_state.entries, self._cache_state.slots, keys, found)
        return found

    def touch(self, slots: Int32s) -> None:
        slots = checked_slots(slots)
        distinct, before = np.empty_like(slots), self._cache_state.tallies[_HITS]
        self.require(kernels.touch_slots(self._cache_state, slots, distinct), slots, "touch", "resident")
        self._observe(distinct[: self._cache_state.tallies[_HITS] - before])

    def use(self, keys: Int64s) -> Int32s | None:
        """``find`` and ``touch`` by one compiled call; None, and nothing changes, if a row is not in, or awaited."""
        (found, distinct), before = np.empty((2, len(keys)), np.int32), self._cache_state.tallies.item(_HITS)
        if not kernels.use_keys(self._cache_state, keys, found, distinct):
            return None
        self._observe(distinct[: self._cache_state.tallies.item(_HITS) - before])
        return found

    def _observe(self, slots: Int32s) -> None:
        """The rows of these resident slots were accessed."""
        if self.policy == "tinylfu":
            keys, place = self._cache_state.slots["key"][slots], 0
            while (place := kernels.sample_keys(self._half_life.waiting, self.capacity, keys, place)) >= 0:
                kernels.age(self._cache_state, self._half_life)

    def admit(self, admission: Admission) -> AdmitStatus:
        progress = admission.progress
        if progress.item(STAMP) < 0:
            self._require_stamps(1)
            self._cache_state.tallies[Tally.STAMP] += 1
            progress[STAMP] = self._cache_state.tallies[Tally.STAMP]
        stamp = progress.item(STAMP)
        assert stamp == self._cache_state.tallies[Tally.STAMP], "another admission ran between the calls of one"
        num_before = progress.item(NUM_UNIQUE)
        status = kernels.admit_keys(
            self._cache_state,
            checked_keys(admission.keys),
            admission.order,
            stamp,
            admission.inverse,
            admission.unique_slots,
            admission.missing,
            progress,
        )
        self._observe(admission.unique_slots[num_before : progress.item(NUM_UNIQUE)])
        return AdmitStatus(status)

    def _require_stamps(self, count: int) -> None:
        """So many admissions may follow before stamps begin again."""
        if self._cache_state.tallies[Tally.STAMP] > _STAMP_MAX - count:
            self._cache_state.slots["stamp"] = 0
            self._cache_state.tallies[Tally.STAMP] = 0

    def dirty_victims(self, count: int, gap: int) -> Int32s:
        """See RowCache. A call walks past every pinned slot before these."""
        require_int(count, "count", 0, NUMBER_MAX)
        found: Int32s = np.empty(min(count, self.num_resident), np.int32)
        return found[: kernels.dirty_victim_slots(self._cache_state, found, gap)]

    def by_admission(self, slots: Int32s) -> Int32s:
        sorted_slots: Int32s = slots[np.argsort(self._admitted(indexes(slots)), kind="stable")]  # the fastest kind here
        return sorted_slots

    def _admitted(self, slots: Any) -> Int64s:
        """int64 [n]: numbers that ascend by last admission, then by first use within it."""
        records = self._cache_state.slots  # whole records are copied ten times as slowly as fields
        admitted: Int64s = records["stamp"][slots].astype(np.int64) << 32 | records["number"][slots]
        return admitted

    def keys_of(self, slots: Int32s) -> Int64s:
        slots = checked_slots(slots)
        keys: Int64s = np.empty(len(slots), np.int64)
        self.require(kernels.keys_of_slots(self._cache_state, slots, keys), slots, "give the key of", "resident")
        return keys

    def resident_slots(self) -> Int32s:
        listed: Int32s = np.empty(self.num_resident, np.int32)
        count = kernels.list_slots(self._cache_state, listed)
        assert count == len(listed), f"at least {count} slots in the policy's list, {len(listed)} resident"
        return listed

    def list_more(self, listing: Listing, limit: int) -> bool:
        """See RowCache. The order is by the policy's rank, then by last admission."""
        stop = min(listing.next_slot + require_int(limit, "limit", 1, NUMBER_MAX), self.capacity)
        slots = listing.next_slot + np.flatnonzero(self.flags[listing.next_slot : stop])
        listing.add(self._cache_state.slots["key"][slots], ranks_of(self._cache_state, slots), self._admitted(slots))
        listing.next_slot = stop
        return stop < self.capacity

    def _drop(self, slots: Int32s, evictions: int) -> int:
        return int(kernels.drop_slots(self._cache_state, slots, evictions))

    def access(self, keys: Int64s, starts: Int64s | None = None, *, depth: int = 0, held_rows: int = 0) -> Bools:
        """Replay batches as a store looks them up, loading nothing: bool [n], True for a hit.

        A batch's rows are pinned until the next one. Where all slots are pinned, they are released, and the rest of the
        batch goes on. In the end nothing is pinned.

        Args:
            keys: int64 [n], distinct within a batch.
            starts: int64 [batches + 1], ascending from 0 to n: where each batch begins; default: each key is one.
            depth: batches that stay pinned behind the newest one, as prefetched ones do.
            held_rows: of these and the newest one; where they are more, fewer stay pinned.

        Raises:
            ValueError, TypeError: ``starts`` do not cover the keys, or a number is negative or none. Nothing changed.
        """
        require_int(depth, "depth", 0, NUMBER_MAX)
        require_int(held_rows, "held_rows", 0, NUMBER_MAX)
        keys = checked_keys(keys)
        starts = np.arange(len(keys) + 1) if starts is None else checked_starts(starts, len(keys))
        unclean = self.num_dirty + self.num_frozen
        assert self.num_pinned == unclean == 0, f"replay with {self.num_pinned} pinned, {unclean} dirty"
        is_hit = np.empty(len(keys), np.bool_)
        pinned, scratch = np.full(len(keys), -1, np.int32), np.empty((2, np.diff(starts).max(initial=0)), np.int32)
        limits = np.array([depth, held_rows, 0, 0, 0, 0])
        self._require_stamps(2 * len(keys))
        kernels.replay_batches(self._cache_state, self._half_life, keys, starts, limits, pinned, is_hit, scratch)
        return is_hit

    def check_integrity(self) -> None:
        check_state(self._cache_state)
