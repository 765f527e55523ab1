"""The warm tier: rows in host memory, evicted by one of these policies:

=========  =====================================================================
"auto"     what we think best: "tinylfu"; may change between releases
"lru"      exact least-recently-used
"lfu"      exact least-frequently-used
"tinylfu"  least frequently used by counts that outlive residence and age, or
           LRU where a sample says that it hits more
=========  =====================================================================

Besides its rows a cache needs ``OVERHEAD_BYTES`` for each: 7 of index, 32 of slot record, with LFU 16 of buckets, with
TinyLFU 16 of sketch. And a cache of any size up to 500 bytes, with TinyLFU 37 KiB. Memory is taken from the system as
slots are first used.
"""

import bisect
from typing import Any, Final

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s
from ..system.checks import require_choice
from . import admission as kernels
from .base import (
    CAPACITY_MAX,
    DIRTY,
    FROZEN,
    LOADING,
    NUM_UNIQUE,
    RESIDENT,
    STAMP,
    Admission,
    AdmitStatus,
    RowCache,
    checked,
)
from .cache_state import (
    BUCKET_BYTES,
    LEVELS,
    SLOT_DTYPE,
    CacheState,
    Tally,
    arena_bytes,
    new_state,
    sketch_width,
    state_bytes_of,
)
from .tinylfu import IN_WINDOW, half_life_bytes_of, new_half_life

INDEX_BYTES: Final = 7
OVERHEAD_BYTES: Final[dict[str, int]] = {
    "lru": INDEX_BYTES + SLOT_DTYPE.itemsize,
    "lfu": INDEX_BYTES + SLOT_DTYPE.itemsize + BUCKET_BYTES,
    "tinylfu": INDEX_BYTES + SLOT_DTYPE.itemsize + sketch_width(4) // 4,
}
"""Index and policy, in bytes per cached row."""
AUTO: Final = "auto"
"""The default policy's name."""
_BEST: Final = "tinylfu"
"""docs/performance.md has the measurements."""
POLICIES: Final[tuple[str, ...]] = (AUTO, *OVERHEAD_BYTES)
_STAMP_MAX: Final = 2**31 - 1
_HITS: Final = int(Tally.HITS)
_STAMP: Final = int(Tally.STAMP)
_STATUSES: Final = tuple(AdmitStatus)


def resolve_policy(policy: str) -> str:
    """The policy that a name stands for: "auto" stands for another, any other for itself."""
    return _BEST if policy == AUTO else policy


def capacity_for(policy: str, budget_bytes: int, *, weight_words: int, state_words: int) -> int:
    """The largest capacity whose rows, index and policy fit the budget; 0 if not even one row does."""
    most = min(max(budget_bytes, 0) // OVERHEAD_BYTES[resolve_policy(policy)], CAPACITY_MAX)

    def size_bytes(capacity: int) -> int:
        return size_bytes_of(policy, capacity, weight_words=weight_words, state_words=state_words)

    return bisect.bisect_right(range(1, most + 1), budget_bytes, key=size_bytes)


def size_bytes_of(policy: str, capacity: int, *, weight_words: int, state_words: int) -> int:
    """Bytes of a cache of this capacity: rows, index and policy."""
    name = resolve_policy(policy)
    overhead = state_bytes_of(capacity, name) + (half_life_bytes_of(capacity) if name == "tinylfu" else 0)
    return arena_bytes(capacity, weight_words) + arena_bytes(capacity, state_words) + overhead


class DdrCache(RowCache):
    """A row cache that evicts.

    Args:
        capacity: slots, at least 1.
        weight_words: 64-bit words of weights a row; 0 for a cache without rows, to simulate.
        state_words: 64-bit words of optimizer state a row.
        policy: one of ``POLICIES``.

    Raises:
        ValueError: no such capacity or policy.
    """

    def __init__(self, capacity: int, *, weight_words: int, state_words: int, policy: str) -> None:
        self.require_capacity(capacity)
        require_choice(policy, POLICIES, "policy")
        self.policy: Final = resolve_policy(policy)
        self._cache_state: CacheState = new_state(capacity, self.policy)
        self._index = self._cache_state.entries, self._cache_state.slots, self._cache_state.tallies
        self._half_life = new_half_life(self._cache_state)
        slots = self._cache_state.slots[:-1]
        super().__init__(
            slots["flags"], slots["pins"], self._cache_state.tallies, weight_words=weight_words, state_words=state_words
        )

    @property
    def size_bytes(self) -> int:
        words = {"weight_words": self.weights.shape[1], "state_words": self.state.shape[1]}
        return size_bytes_of(self.policy, self.capacity, **words)

    def find(self, keys: Int64s) -> Int32s:
        keys = checked(keys, "int64")
        found: Int32s = np.zeros(len(keys), np.int32)
        kernels.find_keys(*self._index, keys, found)
        return found

    def use(self, keys: Int64s) -> Int32s | None:
        keys = checked(keys, "int64")
        (found, distinct), before = np.zeros((2, len(keys)), np.int32), self._cache_state.tallies.item(_HITS)
        if not kernels.use_keys(self._cache_state, keys, found, distinct):
            return None
        if self.policy == "tinylfu":
            distinct = distinct[: self._cache_state.tallies.item(_HITS) - before]
            self._note_accesses(distinct)
        return found

    def admit(self, admission: Admission) -> AdmitStatus:
        progress, state = admission.progress, self._cache_state
        if progress.item(STAMP) < 0:
            if state.tallies.item(_STAMP) == _STAMP_MAX:
                self._restart_stamps()
            state.tallies[_STAMP] += 1
            progress[STAMP] = state.tallies[_STAMP]
        stamp, num_before = progress.item(STAMP), progress.item(NUM_UNIQUE)
        assert stamp == state.tallies.item(_STAMP), "another admission ran between the calls of one"
        status = kernels.admit_keys(
            state, admission.keys, admission.order, stamp, admission.inverse, admission.unique_slots,
            admission.missing, progress,
        )  # fmt: skip
        if self.policy == "tinylfu":
            self._note_accesses(admission.unique_slots[num_before : progress.item(NUM_UNIQUE)])
        return _STATUSES[status]

    def _note_accesses(self, slots: Int32s) -> None:
        place = 0
        while (place := kernels.sample_slots(self._cache_state.slots, self._half_life.waiting, slots, place)) >= 0:
            kernels.age(self._cache_state, self._half_life)

    def _restart_stamps(self) -> None:
        self._cache_state.slots["stamp"] = 0
        self._cache_state.tallies[_STAMP] = 0

    def dirty_victims(self, count: int, gap: int) -> Int32s:
        """See RowCache. A call walks past every pinned slot before these."""
        found: Int32s = np.empty(min(count, self.num_resident), np.int32)
        return found[: kernels.dirty_victim_slots(self._cache_state, found, gap)]

    def _keys_in(self, slots: Int32s) -> Int64s:
        keys: Int64s = self._cache_state.slots["key"][slots]
        return keys

    def _ranks(self, slots: Any) -> Int32s:
        return kernels.ranks_of(self._cache_state, slots)

    def _admitted(self, slots: Any) -> Int64s:
        records = self._cache_state.slots  # whole records are copied ten times as slowly as fields
        admitted: Int64s = records["stamp"][slots].astype(np.int64) << 32 | records["number"][slots]
        return admitted

    def resident_slots(self) -> Int32s:
        listed: Int32s = np.empty(self.num_resident, np.int32)
        count = kernels.list_slots(self._cache_state, listed)
        assert count == len(listed), f"at least {count} slots in the policy's list, {len(listed)} resident"
        return listed

    def _drop_rows(self, slots: Int32s, evictions: int) -> int:
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
        """
        keys = checked(keys, "int64")
        starts = np.arange(len(keys) + 1) if starts is None else checked(starts, "int64")
        unclean = self.num_dirty + self.num_frozen
        assert self.num_pinned == unclean == 0, f"replay with {self.num_pinned} pinned, {unclean} dirty"
        is_hit = np.empty(len(keys), np.bool_)
        pinned, scratch = np.full(len(keys), -1, np.int32), np.zeros((2, np.diff(starts).max(initial=0)), np.int32)
        limits = np.array([depth, held_rows, 0, 0, 0, 0])
        if self._cache_state.tallies.item(_STAMP) > _STAMP_MAX - 2 * len(keys):
            self._restart_stamps()
        kernels.replay_batches(self._cache_state, self._half_life, keys, starts, limits, pinned, is_hit, scratch)
        return is_hit

    def check_integrity(self) -> None:
        """See RowCache. O(capacity)."""
        terms = _slot_terms(self._cache_state) | _order_terms(self._cache_state)
        counted = {name: (int(kept), np.count_nonzero(found)) for name, (kept, found) in terms.items()}
        broken = "; ".join(name for name, (kept, found) in counted.items() if kept != found)
        listed = ", ".join(f"{name}: {kept} kept, {found} counted" for name, (kept, found) in counted.items())
        assert not broken, f"cache of {self.capacity} slots: broken: {broken}. Terms: {listed}"


_Terms = dict[str, tuple[Any, Any]]
"""By name, a number that is kept, and an array with as many that are true."""


def _chain(following: Any, first: int, end: int) -> Int64s:
    """The links from ``first`` to before ``end``, as many as there may be."""
    links: list[int] = []
    while first != end and len(links) < len(following):
        links.append(first)
        first = int(following[first])
    return np.array(links, np.int64)


def _freed(following: Any, first: int, num_used: int) -> Int64s:
    """What was freed, numbers being one more in its chain, and what was never used."""
    freed = _chain([0, *following.tolist()], first, 0) - 1
    return np.concatenate([freed, np.arange(num_used, len(following))])


def _listed(state: CacheState) -> Int64s:
    """The slots in the policy's list, next victim first."""
    root = len(state.slots) - 1
    return _chain(state.slots["next"].tolist(), int(state.slots["next"][root]), root)


def _slot_terms(state: CacheState) -> _Terms:
    slots, tallies = state.slots, state.tallies
    root, listed = len(slots) - 1, _listed(state)
    flags, pins = slots["flags"][:-1], slots["pins"][:-1]
    free = _freed(slots["next"][:-1], int(tallies[Tally.FREE_SLOT]), int(tallies[Tally.USED_SLOTS]))
    found: Int32s = np.zeros(len(listed), np.int32)
    kernels.find_keys(state.entries, slots, tallies, slots["key"][listed], found)
    num_resident, unclean = tallies[Tally.RESIDENT], flags & (DIRTY | FROZEN)
    return {
        "free slots": (root - num_resident, free >= 0),
        "resident": (num_resident, flags & RESIDENT),
        "filled": (tallies[Tally.FILLED], flags & (RESIDENT | LOADING) == RESIDENT),
        "index entries": (num_resident, state.entries),
        "listed": (num_resident, listed >= 0),
        "dirty": (tallies[Tally.DIRTY], flags & DIRTY),
        "frozen": (tallies[Tally.FROZEN], flags & FROZEN),
        "pinned": (tallies[Tally.PINNED], pins),
        "free but in use": (0, flags[free] | pins[free]),
        "listed but not resident": (0, flags[listed] & RESIDENT == 0),
        "wrong back links": (0, slots["previous"][[*listed, root]] != [root, *listed]),
        "not found by key": (0, found != listed),
        "negative pins": (0, pins < 0),
        "loading and dirty": (0, (flags & LOADING != 0) & (unclean != 0)),
        "dirty and frozen": (0, unclean == DIRTY | FROZEN),
        "flags or pins without a row": (0, ((flags != 0) | (pins != 0)) & (flags & RESIDENT == 0)),
    }


def _order_terms(state: CacheState) -> _Terms:
    """Of LFU's buckets, and of TinyLFU's levels."""
    root, listed, tallies = len(state.slots) - 1, _listed(state), state.tallies
    if state.bucket is not None:
        buckets = state.bucket[listed]
        lasts = np.flatnonzero(np.diff(buckets, append=-1))
        free = _freed(state.bucket_tail, int(tallies[Tally.FREE_BUCKET]), int(tallies[Tally.USED_BUCKETS]))
        return {
            "free buckets": (root - len(lasts), free >= 0),
            "buckets' last slots wrong": (0, state.bucket_tail[buckets[lasts]] != listed[lasts]),
            "buckets out of order": (0, np.diff(state.bucket_count[buckets[lasts]]) <= 0),
        }
    if not state.sketch.size:
        return {}
    rank = state.slots["rank"][listed]
    in_window = rank & IN_WINDOW != 0
    main, levels = listed[~in_window], rank[~in_window] & (LEVELS - 1)
    tails = np.full(LEVELS, root, np.int32)
    tails[levels] = main  # of equal levels the last one wins
    return {
        "window": (tallies[Tally.WINDOW_ROWS], in_window),
        "window before main": (0, np.diff(in_window.astype(int)) < 0),
        "levels out of order": (0, np.diff(levels) < 0),
        "levels' last slots wrong": (0, state.level_tail != tails),
        "last of main wrong": (0, tallies[Tally.MAIN_LAST] != [root, *main][-1]),
    }
