"""What is the fast cache's own: its memory, its bounds, its arguments, and that check_integrity sees damage."""

import tracemalloc
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from tests.conformance.row_cache import admitted, keys_from, order_of, slots_from, visit
from tierstore.cache import OVERHEAD_BYTES, Admission, AdmitStatus, DdrCache, capacity_for, size_bytes_of
from tierstore.cache.base import STAMP
from tierstore.cache.books import Tally
from tierstore.cache.flags import DIRTY, LOADING, RESIDENT
from tierstore.kernels.jit import JIT_ENABLED

PolicyName = Literal["lru", "lfu", "tinylfu", "lookahead"]
POLICY_NAMES: tuple[PolicyName, ...] = ("lru", "lfu", "tinylfu", "lookahead")


@pytest.mark.parametrize(
    ("policy", "stated_bytes", "fixed_bytes"),
    [("lru", 44, 500), ("lfu", 60, 500), ("tinylfu", 60, 28_600), ("lookahead", 212, 21_000)],
)
def test_overhead_is_what_is_stated_and_what_is_allocated(
    policy: PolicyName, stated_bytes: int, fixed_bytes: int
) -> None:
    assert OVERHEAD_BYTES[policy] == stated_bytes
    capacity, weight_words, state_words = 50_000, 32, 4
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = DdrCache(capacity, weight_words=weight_words, state_words=state_words, policy=policy)
        allocated_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    row_bytes = capacity * (weight_words + state_words) * 8
    assert 0 <= cache.size_bytes - row_bytes - capacity * stated_bytes <= fixed_bytes
    # Python's own objects: the cache, its tuple and its arrays' headers.
    assert 0 <= allocated_bytes - cache.size_bytes < 12_000


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("weight_words", "state_words"), [(32, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("budget_bytes", [400, 1000, 4096, 1_000_003])
def test_capacity_is_the_largest_that_fits(
    policy: PolicyName, weight_words: int, state_words: int, budget_bytes: int
) -> None:
    capacity = capacity_for(policy, budget_bytes, weight_words=weight_words, state_words=state_words)
    if capacity:
        cache = DdrCache(capacity, weight_words=weight_words, state_words=state_words, policy=policy)
        assert cache.size_bytes <= budget_bytes
    larger = DdrCache(capacity + 1, weight_words=weight_words, state_words=state_words, policy=policy)
    assert larger.size_bytes > budget_bytes


@pytest.mark.parametrize("budget_bytes", [-5, 0, 100])
def test_no_row_fits(budget_bytes: int) -> None:
    assert capacity_for("lru", budget_bytes, weight_words=32, state_words=0) == 0


def test_capacity_is_bounded_by_the_slot_type() -> None:
    assert capacity_for("lru", 2**60, weight_words=1, state_words=0) == 2**31 - 2
    with pytest.raises(ValueError, match="capacity"):
        DdrCache(2**31 - 1, weight_words=1, state_words=0, policy="lru")


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("capacity", [1, 2, 999])
def test_size_is_foretold(policy: PolicyName, capacity: int) -> None:
    cache = DdrCache(capacity, weight_words=5, state_words=2, policy=policy)
    assert cache.size_bytes == size_bytes_of(policy, capacity, weight_words=5, state_words=2)


def test_memory_is_taken_as_slots_are_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = DdrCache(2**22, weight_words=64, state_words=8, policy="lfu")
    assert cache.size_bytes > 2**31
    assert process.memory_info().rss - before < 2**26


def test_unknown_policy() -> None:
    policy: Any = "fifo"
    with pytest.raises(ValueError, match="fifo"):
        DdrCache(1, weight_words=1, state_words=1, policy=policy)


@pytest.mark.parametrize("keys", [[1, 2], np.array([1, 2], np.int32), np.array([[1]]), np.array([1.0])])
def test_keys_of_a_wrong_type_are_refused(keys: Any) -> None:
    cache = DdrCache(2, weight_words=1, state_words=1, policy="lru")
    for action in (cache.find, cache.access):
        with pytest.raises(TypeError, match="keys must be a numpy array, int64"):
            action(keys)


def test_slots_of_a_wrong_type_are_refused() -> None:
    cache = DdrCache(2, weight_words=1, state_words=1, policy="lru")
    with pytest.raises(TypeError, match="slots must be a numpy array, int32"):
        cache.pin(np.array([0], np.int64))  # type: ignore[arg-type]


@pytest.mark.kernel
def test_strided_and_read_only_keys() -> None:
    cache = DdrCache(4, weight_words=1, state_words=0, policy="lru")
    keys = np.arange(8, dtype=np.int64)[::2]
    keys.flags.writeable = False
    admission = Admission(keys)
    assert cache.admit(admission) is AdmitStatus.COMPLETE
    assert cache.keys_of(admission.slots).tolist() == [0, 2, 4, 6]
    assert cache.keys_of(admission.slots[::2]).tolist() == [0, 4]


@pytest.mark.kernel
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_stamps_start_over(policy: PolicyName) -> None:
    cache = DdrCache(4, weight_words=0, state_words=0, policy=policy)
    # Key 3 keeps stamp 1, which the admission after the last number has again.
    visit(cache, 3)
    cache._books.tallies[Tally.STAMP] = 2**31 - 2
    last = admitted(cache, 2, 1)
    assert last.progress[STAMP] == 2**31 - 1
    again = Admission(keys_from(1, 2, 3, 1))
    assert cache.admit(again) is AdmitStatus.COMPLETE
    assert again.progress[STAMP] == 1
    assert again.inverse.tolist() == [0, 1, 2, 0]
    assert again.num_unique == cache.num_pinned == 3
    assert again.num_missing == 0
    cache.check_integrity()


@pytest.mark.kernel
@pytest.mark.parametrize("policy", ["lfu", "tinylfu"])
def test_admission_passes_each_pinned_slot_once(policy: PolicyName) -> None:
    # Half of the cache is pinned and first in line; a scan from the start for each victim would take minutes.
    capacity = 100_000 if JIT_ENABLED else 200
    half = capacity // 2
    cache = DdrCache(capacity, weight_words=0, state_words=0, policy=policy)
    cache.access(np.arange(capacity, dtype=np.int64))
    cache.pin(cache.find(np.arange(half, dtype=np.int64)))
    admission = Admission(np.arange(capacity, capacity + half, dtype=np.int64))
    assert cache.admit(admission) is AdmitStatus.COMPLETE
    assert set(order_of(cache)) == {*range(half), *range(capacity, capacity + half)}
    assert cache.admit(Admission(keys_from(-1))) is AdmitStatus.ALL_PINNED
    cache.check_integrity()


def test_refusals_name_the_slot_and_its_state() -> None:
    cache = DdrCache(4, weight_words=1, state_words=0, policy="lru")
    held = admitted(cache, 9)
    cache.mark_dirty(held.slots)
    with pytest.raises(AssertionError, match=r"evict slot 0: it must be .*; it is resident, dirty, changed, pinned 1"):
        cache.evict(held.slots)
    with pytest.raises(AssertionError, match="pin slot 7: the cache has 4 slots"):
        cache.pin(slots_from(7))


def books_with_rows(policy: PolicyName) -> DdrCache:
    """Six slots: one never used, one freed; pinned, dirty and loading rows; counts 1 to 3."""
    cache = DdrCache(6, weight_words=1, state_words=0, policy=policy)
    cache._books.tallies[Tally.WINDOW_LIMIT] = 1  # so that tinylfu has rows in main
    visit(cache, 1, 2, 3, 4, 6, 2, 3, 3)
    cache.evict(cache.find(keys_from(4, 6)))
    cache.mark_dirty(admitted(cache, 2).slots)
    cache.admit(Admission(keys_from(5)))
    cache.check_integrity()
    return cache


def _slot(cache: DdrCache, key: int) -> int:
    return int(cache.find(keys_from(key))[0])


def _forget_entry(cache: DdrCache) -> None:
    entries = cache._books.entries
    entries[np.flatnonzero(entries)[0]] = 0


def _set_flag(key: int, flags: int) -> Any:
    def damage(cache: DdrCache) -> None:
        cache._books.slots["flags"][_slot(cache, key)] = flags

    return damage


def _set_field(key: int, field: str, value: int) -> Any:
    def damage(cache: DdrCache) -> None:
        cache._books.slots[field][_slot(cache, key)] = value

    return damage


def _add_tally(tally: Tally, amount: int) -> Any:
    def damage(cache: DdrCache) -> None:
        cache._books.tallies[tally] += amount

    return damage


def _lose_tail(cache: DdrCache) -> None:
    cache._books.bucket_tail[cache._books.bucket[_slot(cache, 3)]] = _slot(cache, 1)


def _raise_count(cache: DdrCache) -> None:
    cache._books.bucket_count[cache._books.bucket[_slot(cache, 1)]] = 99


def _lose_level(cache: DdrCache) -> None:
    cache._books.level_tail[1] = cache.capacity


def _lose_main(cache: DdrCache) -> None:
    cache._books.tallies[Tally.MAIN_LAST] = cache.capacity


def _lose_bucket(cache: DdrCache) -> None:
    cache._books.tallies[Tally.USED_BUCKETS] += 1


def _pin_free(cache: DdrCache) -> None:
    cache._books.slots["pins"][cache._books.tallies[Tally.FREE_SLOT] - 1] = 1


DAMAGES: dict[str, tuple[Any, str]] = {
    "index entry lost": (_forget_entry, "index entries"),
    "row not resident": (_set_flag(1, 0), "listed but not resident"),
    "dirty bit lost": (_set_flag(2, RESIDENT), "dirty"),
    "dirty bit gained": (_set_flag(1, RESIDENT | DIRTY), "dirty"),
    "loading and dirty": (_set_flag(5, RESIDENT | LOADING | DIRTY), "loading and dirty"),
    "pin lost": (_set_field(2, "pins", 0), "pinned"),
    "pin below zero": (_set_field(1, "pins", -1), "negative pins"),
    "key changed": (_set_field(1, "key", 77), "not found by key"),
    "link changed": (_set_field(2, "previous", 5), "wrong back links"),
    "list in a ring": (_set_field(3, "next", 0), "wrong back links"),
    "resident miscounted": (_add_tally(Tally.RESIDENT, 1), "free slots"),
    "free slot lost": (_add_tally(Tally.USED_SLOTS, 1), "free slots"),
    "free slot pinned": (_pin_free, "free but in use"),
}
LFU_DAMAGES: dict[str, tuple[Any, str]] = {
    "bucket's last slot wrong": (_lose_tail, "buckets' last slots wrong"),
    "buckets out of order": (_raise_count, "buckets out of order"),
    "bucket lost": (_lose_bucket, "free buckets"),
}
TINYLFU_DAMAGES: dict[str, tuple[Any, str]] = {
    "level's last slot wrong": (_lose_level, "levels' last slots wrong"),
    "main's last slot wrong": (_lose_main, "last of main wrong"),
    "levels out of order": (_set_field(1, "rank", 40), "levels out of order"),
    "window's row in main": (_set_field(5, "rank", 1), "window"),
    "window miscounted": (_add_tally(Tally.WINDOW_ROWS, 1), "window"),
}


def books_with_announcements() -> DdrCache:
    """Rows 1 and 3 of unknown use, 2 and 5 in two groups; a use that was retired out of turn."""
    cache = DdrCache(6, weight_words=1, state_words=0, policy="lookahead")
    visit(cache, 1, 2, 3, 5)
    for keys in ((2, 7), (5, 2), (5,)):
        cache.announce(keys_from(*keys))
    cache.retire(2)
    assert order_of(cache) == [1, 3, 5, 2]
    cache.check_integrity()
    return cache


def _lose_group(cache: DdrCache) -> None:
    cache._books.level_tail[1] = cache.capacity


def _lose_use(cache: DdrCache) -> None:
    entries = cache._books.last_uses
    entries[:] = 0


LOOKAHEAD_DAMAGES: dict[str, tuple[Any, str]] = {
    "group's last slot wrong": (_lose_group, "groups' last slots wrong"),
    "announced key lost": (_lose_use, "rows in another group"),
    "row in another group": (_set_field(5, "rank", 1), "rows in another group"),
    "row in no group": (_set_field(2, "rank", -1), "rows in another group"),
    "last of unknown use wrong": (_add_tally(Tally.UNKNOWN_LAST, -1), "last of unknown use wrong"),
    "use miscounted": (_add_tally(Tally.USES_END, 1), "uses"),
}


@pytest.mark.kernel
@pytest.mark.parametrize("name", LOOKAHEAD_DAMAGES)
def test_check_integrity_sees_damage_to_announcements(name: str) -> None:
    cache = books_with_announcements()
    damage, law = LOOKAHEAD_DAMAGES[name]
    damage(cache)
    with pytest.raises(AssertionError, match=rf"broken: (.*; )?{law}[;.]"):
        cache.check_integrity()


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *((policy, name) for policy in POLICY_NAMES for name in DAMAGES),
        *(("lfu", name) for name in LFU_DAMAGES),
        *(("tinylfu", name) for name in TINYLFU_DAMAGES),
    ],
)
def test_check_integrity_sees_damage_and_prints_every_term(policy: PolicyName, name: str) -> None:
    cache = books_with_rows(policy)
    damage, law = (DAMAGES | LFU_DAMAGES | TINYLFU_DAMAGES)[name]
    damage(cache)
    with pytest.raises(AssertionError, match=rf"broken: (.*; )?{law}[;.].* Terms: .*resident: . kept.*pinned: "):
        cache.check_integrity()
