"""The conservation laws of a cache's bookkeeping, each term of them counted anew."""

from typing import Any, Final

import numpy as np

from ..kernels.arrays import Int64s
from ..kernels.jit import uncounted_kernel as kernel
from .books import MAX_BATCHES, CacheState, Tally
from .flags import DIRTY, FROZEN, LOADING, RESIDENT
from .index import index_find
from .lookahead import UNKNOWN
from .tinylfu import IN_WINDOW

__all__ = ["check_state"]


_FAULTS: Final = (
    "free_but_in_use",
    "listed_not_resident",
    "wrong_back_links",
    "not_found_by_key",
    "bucket_faults",
    "level_faults",
    "group_faults",
    "negative_pins",
    "loading_unpinned",
    "loading_dirty",
    "dirty_and_frozen",
    "flags_without_row",
    "pins_without_row",
)


@kernel
def _survey_list(state: CacheState, found: Int64s) -> None:
    """Walk the policy's list. ``found``: slots; slots not resident; slots whose back link is wrong; slots whose key
    does not lead to them; buckets; bucket faults."""
    slots = state.slots
    root = np.int64(slots.size - 1)
    before = np.int64(root)
    slot = np.int64(slots[root]["next"])
    while slot != root and found[0] < root:
        found[0] += 1
        found[1] += slots[slot]["flags"] & RESIDENT == 0
        found[2] += slots[slot]["previous"] != before
        found[3] += index_find(state.entries, slots, slots[slot]["key"]) != slot
        if state.bucket.size:
            bucket = state.bucket[slot]
            if before == root or state.bucket[before] != bucket:
                found[4] += 1
                if before != root:
                    found[5] += state.bucket_tail[state.bucket[before]] != before
                    found[5] += state.bucket_count[state.bucket[before]] >= state.bucket_count[bucket]
        before = slot
        slot = np.int64(slots[slot]["next"])
    found[1] += slot != root
    found[2] += slots[root]["previous"] != before
    if state.bucket.size and before != root:
        found[5] += state.bucket_tail[state.bucket[before]] != before


@kernel
def _survey_levels(state: CacheState, found: Int64s) -> None:
    """Walk a TinyLFU list. ``found``: slots in the window; slots out of order, and wrong ends of levels and of main."""
    slots, tails = state.slots, state.level_tail
    root = np.int64(slots.size - 1)
    before: Any
    level: Any
    before, level, in_window, listed = root, np.int64(-1), np.int64(0), 0
    slot = np.int64(slots[root]["next"])
    while slot != root and listed < root:
        listed += 1
        frequency = np.int64(slots[slot]["rank"])
        if frequency & IN_WINDOW:
            if found[0] == 0:
                found[1] += state.tallies[Tally.MAIN_LAST] != before
            found[0] += 1
        else:
            found[1] += found[0] > 0 or frequency < level
            for passed in range(max(level, 0), frequency):
                found[1] += tails[passed] != (before if passed == level else root)
            level = frequency
        in_window = frequency & IN_WINDOW
        before = slot
        slot = np.int64(slots[slot]["next"])
    if not in_window:
        found[1] += state.tallies[Tally.MAIN_LAST] != before
    last = state.tallies[Tally.MAIN_LAST]
    for passed in range(max(level, 0), tails.size):
        found[1] += tails[passed] != (last if passed == level else root)


@kernel
def _survey_groups(state: CacheState, found: Int64s) -> None:
    """Walk a lookahead list. ``found``: slots that lie elsewhere than their row's next announced use says, and
    wrong ends of groups."""
    slots, tails, uses = state.slots, state.level_tail, state.uses
    root = np.int64(slots.size - 1)
    oldest = state.tallies[Tally.OLDEST_BATCH]
    listed, last_unknown = 0, root
    slot = np.int64(slots[root]["next"])
    ahead = np.int64(MAX_BATCHES)
    num_groups = 0
    while slot != root and listed < root:
        listed += 1
        group = np.int64(slots[slot]["rank"])
        newest = index_find(state.last_uses, uses, slots[slot]["key"])
        expected = np.int64(uses[uses[newest]["next"]]["batch"]) if newest >= 0 else np.int64(UNKNOWN)
        found[0] += group != expected
        if group == UNKNOWN:
            found[0] += ahead != MAX_BATCHES
            last_unknown = slot
        else:
            found[0] += state.batches[group]["is_open"] == 0
            place = (group - oldest) % MAX_BATCHES
            found[0] += place > ahead
            num_groups += place != ahead
            ahead = place
        after = np.int64(slots[slot]["next"])
        if group != UNKNOWN and (after == root or slots[after]["rank"] != group):
            found[0] += tails[group] != slot
        slot = after
    found[0] += state.tallies[Tally.UNKNOWN_LAST] != last_unknown
    for number in range(tails.size):
        num_groups -= tails[number] != root
    found[0] += num_groups != 0


@kernel
def _survey_free(state: CacheState, found: Int64s) -> None:
    """``found``: slots never used or freed; those of them that hold something; buckets never used or freed."""
    slots, tallies = state.slots, state.tallies
    capacity = np.int64(slots.size - 1)
    found[0] = capacity - tallies[Tally.USED_SLOTS]
    for unused in range(tallies[Tally.USED_SLOTS], capacity):
        found[1] += slots[unused]["flags"] != 0 or slots[unused]["pins"] != 0
    slot = np.int64(tallies[Tally.FREE_SLOT] - 1)
    while slot >= 0 and found[0] <= capacity:
        found[0] += 1
        found[1] += slots[slot]["flags"] != 0 or slots[slot]["pins"] != 0
        slot = np.int64(slots[slot]["next"]) - 1
    found[2] = state.bucket.size - tallies[Tally.USED_BUCKETS]
    bucket = tallies[Tally.FREE_BUCKET] - 1
    while bucket >= 0 and found[2] <= capacity:
        found[2] += 1
        bucket = np.int64(state.bucket_tail[bucket]) - 1


def _uses_of_batches(state: CacheState) -> int:
    """Of the batches announced and not forgotten."""
    numbers = range(int(state.tallies[Tally.OLDEST_BATCH]), int(state.tallies[Tally.NEWEST_BATCH]) + 1)
    return sum(int(state.batches[number % MAX_BATCHES]["count"]) for number in numbers)


def _terms(state: CacheState) -> dict[str, int]:
    in_list, in_free = np.zeros(6, np.int64), np.zeros(3, np.int64)
    _survey_list(state, in_list)
    _survey_free(state, in_free)
    in_levels = np.zeros(2, np.int64)
    if state.sketch.size:
        _survey_levels(state, in_levels)
    in_groups = np.zeros(1, np.int64)
    if state.uses.size:
        _survey_groups(state, in_groups)
    flags, pins = state.slots["flags"][:-1], state.slots["pins"][:-1]
    tallies = state.tallies
    return {
        "capacity": len(flags),
        "free": int(in_free[0]),
        "free_but_in_use": int(in_free[1]),
        "resident": int(tallies[Tally.RESIDENT]),
        "resident_flags": int(np.count_nonzero(flags & RESIDENT)),
        "index_entries": int(np.count_nonzero(state.entries)),
        "listed": int(in_list[0]),
        "listed_not_resident": int(in_list[1]),
        "wrong_back_links": int(in_list[2]),
        "not_found_by_key": int(in_list[3]),
        "bucket_capacity": len(state.bucket),
        "buckets": int(in_list[4]),
        "bucket_faults": int(in_list[5]),
        "free_buckets": int(in_free[2]),
        "window": int(tallies[Tally.WINDOW_ROWS]),
        "window_listed": int(in_levels[0]),
        "level_faults": int(in_levels[1]),
        "group_faults": int(in_groups[0]),
        "uses": int(tallies[Tally.USES_END] - tallies[Tally.USES_START]),
        "uses_of_batches": _uses_of_batches(state),
        "dirty": int(tallies[Tally.DIRTY]),
        "dirty_flags": int(np.count_nonzero(flags & DIRTY)),
        "frozen": int(tallies[Tally.FROZEN]),
        "frozen_flags": int(np.count_nonzero(flags & FROZEN)),
        "dirty_and_frozen": int(np.count_nonzero((flags & DIRTY != 0) & (flags & FROZEN != 0))),
        "pinned": int(tallies[Tally.PINNED]),
        "pinned_slots": int(np.count_nonzero(pins)),
        "negative_pins": int(np.count_nonzero(pins < 0)),
        "loading_unpinned": int(np.count_nonzero((flags & LOADING != 0) & (pins == 0))),
        "loading_dirty": int(np.count_nonzero((flags & LOADING != 0) & (flags & (DIRTY | FROZEN) != 0))),
        "flags_without_row": int(np.count_nonzero((flags != 0) & (flags & RESIDENT == 0))),
        "pins_without_row": int(np.count_nonzero((pins != 0) & (flags & RESIDENT == 0))),
    }


def check_state(state: CacheState) -> None:
    """AssertionError, with every term, unless the laws of ``RowCache.check_integrity`` hold. O(capacity)."""
    t = _terms(state)
    laws = {
        "free + resident == capacity": t["free"] + t["resident"] == t["capacity"],
        "resident == resident_flags": t["resident"] == t["resident_flags"],
        "resident == index_entries": t["resident"] == t["index_entries"],
        "resident == listed": t["resident"] == t["listed"],
        "buckets + free_buckets == bucket_capacity": t["buckets"] + t["free_buckets"] == t["bucket_capacity"],
        "window == window_listed": t["window"] == t["window_listed"],
        "uses == uses_of_batches": t["uses"] == t["uses_of_batches"],
        "dirty == dirty_flags": t["dirty"] == t["dirty_flags"],
        "frozen == frozen_flags": t["frozen"] == t["frozen_flags"],
        "pinned == pinned_slots": t["pinned"] == t["pinned_slots"],
    }
    laws |= {f"{name} == 0": t[name] == 0 for name in _FAULTS}
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        terms = ", ".join(f"{name}={value}" for name, value in t.items())
        raise AssertionError(f"cache bookkeeping: broken: {'; '.join(broken)}. Terms: {terms}")
