"""Lookahead: evict the row whose next announced use is farthest; a few steps an access.

Batches are announced as lists of keys, and *retired* when they are used. The eviction list begins with the rows without
an announced use, least recently used first. Behind them each row is in the *group* of the batch that uses it next;
groups lie farthest batch first. So the next victim is a row without an announced use, else the row whose next use is
farthest, to the precision of a batch.

A key's uses to come form a ring, oldest to newest and back, and the index of announced keys leads to the newest. A use
of a batch that was retired out of turn stays in its ring until the uses before it are gone. Uses lie in a ring buffer
in order of batches, which bounds how far ahead one can announce.

Source: L. Belady, A study of replacement algorithms for a virtual-storage computer (IBM Systems Journal, 1966).
"""

from typing import Any, Final

import numpy as np

from ..kernels.arrays import Int64s
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from .books import MAX_BATCHES, CacheState, Tally, link_after, unlink
from .index import index_erase, index_find, index_insert, index_prefetch, index_replace

UNKNOWN: Final = -1
"""A slot's ``rank`` if no use of its row is announced; else its group, the place of the batch that uses it next."""


@inline
def _enter_group(state: CacheState, slot: Any, group: Any) -> None:
    """Enter a slot, last of its group: behind the groups of later batches and the rows without an announced use."""
    slots, tails, tallies = state.slots, state.level_tail, state.tallies
    root = np.int64(slots.size - 1)
    before = np.int64(tallies[Tally.UNKNOWN_LAST])
    place = group
    newest = tallies[Tally.NEWEST_BATCH] % MAX_BATCHES
    for _ in range(MAX_BATCHES):
        if tails[place] != root:
            before = np.int64(tails[place])
            break
        if place == newest:
            break
        place = place + 1 if place + 1 < MAX_BATCHES else 0
    link_after(slots, slot, before)
    tails[group] = slot
    slots[slot]["rank"] = group


@inline
def _enter_unknown(state: CacheState, slot: Any) -> None:
    """Enter a slot, last of those of no known use."""
    link_after(state.slots, slot, state.tallies[Tally.UNKNOWN_LAST])
    state.tallies[Tally.UNKNOWN_LAST] = slot
    state.slots[slot]["rank"] = UNKNOWN


@inline
def lookahead_remove(state: CacheState, slot: Any) -> None:
    """Take a slot out of the list."""
    slots, tails, tallies = state.slots, state.level_tail, state.tallies
    root = slots.size - 1
    group = slots[slot]["rank"]
    before = slots[slot]["previous"]
    if group == UNKNOWN:
        if tallies[Tally.UNKNOWN_LAST] == slot:
            tallies[Tally.UNKNOWN_LAST] = before
    elif tails[group] == slot:
        tails[group] = before if before != root and slots[before]["rank"] == group else root
    unlink(slots, slot)


@inline
def lookahead_touch(state: CacheState, slot: Any) -> None:
    """An access says nothing of a row whose next use is known."""
    if state.slots[slot]["rank"] == UNKNOWN:
        lookahead_remove(state, slot)
        _enter_unknown(state, slot)


@inline
def lookahead_insert(state: CacheState, slot: Any) -> None:
    """Enter a new row's slot where its next announced use puts it."""
    newest = index_find(state.last_uses, state.uses, state.slots[slot]["key"])
    if newest < 0:
        _enter_unknown(state, slot)
    else:
        _enter_group(state, slot, np.int64(state.uses[state.uses[newest]["next"]]["batch"]))


@kernel
def has_room(state: CacheState, num_keys: int) -> Any:
    """Whether one more batch of so many keys can be announced."""
    tallies = state.tallies
    num_uses = tallies[Tally.USES_END] - tallies[Tally.USES_START]
    num_batches = tallies[Tally.NEWEST_BATCH] - tallies[Tally.OLDEST_BATCH] + 1
    return num_batches + 1 < MAX_BATCHES and num_uses + num_keys <= state.uses.size


@kernel
def announce_keys(state: CacheState, keys: Int64s) -> Any:
    """Announce one more batch. Returns its number, or 0 if there is no room for its keys or for a batch."""
    tallies, uses, batches = state.tallies, state.uses, state.batches
    number = tallies[Tally.NEWEST_BATCH] + 1
    start = tallies[Tally.USES_END]
    if not has_room(state, keys.size):
        return 0
    tallies[Tally.NEWEST_BATCH] = number
    group = np.int64(number % MAX_BATCHES)
    end = start
    for i in range(keys.size):
        key = keys[i]
        index_prefetch(state.last_uses, uses, keys, i)
        newest = index_find(state.last_uses, uses, key)
        if newest >= 0 and uses[newest]["batch"] == group:
            continue
        use = np.int64(end % uses.size)
        end += 1
        uses[use]["key"] = key
        uses[use]["batch"] = group
        if newest >= 0:
            uses[use]["next"] = uses[newest]["next"]
            uses[newest]["next"] = use
            index_replace(state.last_uses, key, newest, use)
            continue
        uses[use]["next"] = use
        index_insert(state.last_uses, key, use)
        slot = index_find(state.entries, state.slots, key)
        if slot >= 0:
            lookahead_remove(state, slot)
            _enter_group(state, slot, group)
    tallies[Tally.USES_END] = end
    batches[group]["start"] = start
    batches[group]["count"] = end - start
    batches[group]["is_open"] = 1
    return number


@inline
def _drop_use(state: CacheState, use: Any) -> Any:
    """Take a key's oldest use out of its ring, and those after it whose batch was retired before; returns the use that
    is then the oldest, or -1 if none is left. -2 if ``use`` is not the oldest: then nothing changes."""
    uses = state.uses
    key = uses[use]["key"]
    newest = index_find(state.last_uses, uses, key)
    if uses[newest]["next"] != use:
        return np.int64(-2)
    while use != newest:
        use = np.int64(uses[use]["next"])
        if state.batches[uses[use]["batch"]]["is_open"]:
            uses[newest]["next"] = use
            return use
    index_erase(state.last_uses, key, newest)
    return np.int64(-1)


@kernel
def retire_batch(state: CacheState, number: int) -> None:
    """Drop the batch's uses: it was used, or never will be. Its rows move to their next use. No effect on a retired
    batch."""
    tallies, uses, batches = state.tallies, state.uses, state.batches
    if not tallies[Tally.OLDEST_BATCH] <= number <= tallies[Tally.NEWEST_BATCH]:
        return
    group = np.int64(number % MAX_BATCHES)
    if not batches[group]["is_open"]:
        return
    batches[group]["is_open"] = 0
    start = batches[group]["start"]
    for position in range(start, start + batches[group]["count"]):
        use = np.int64(position % uses.size)
        oldest = _drop_use(state, use)
        slot = index_find(state.entries, state.slots, uses[use]["key"]) if oldest > -2 else np.int64(-1)
        if slot < 0:
            continue
        lookahead_remove(state, slot)
        if oldest < 0:
            _enter_unknown(state, slot)
        else:
            _enter_group(state, slot, np.int64(uses[oldest]["batch"]))
    while tallies[Tally.OLDEST_BATCH] <= tallies[Tally.NEWEST_BATCH]:
        oldest_group = tallies[Tally.OLDEST_BATCH] % MAX_BATCHES
        if batches[oldest_group]["is_open"]:
            break
        tallies[Tally.USES_START] += batches[oldest_group]["count"]
        tallies[Tally.OLDEST_BATCH] += 1
