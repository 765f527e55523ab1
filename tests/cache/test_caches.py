"""What each cache has of its own: memory, bounds, numbering; what it refuses; hit rates on real lookups and on drifting
ones, LRU and LFU against cachetools, TinyLFU against its twin."""

import tracemalloc
from pathlib import Path
from typing import Any

import cachetools
import numpy as np
import psutil
import pytest

from bench.data import criteo_keys
from tests.cache.reference import TinyLFU
from tests.cache.support import admitted, fill, keys_from, order_of, take, visit
from tierstore.cache.base import STAMP, Admission, AdmitStatus
from tierstore.cache.cache_state import Tally
from tierstore.cache.ddr import OVERHEAD_BYTES, DdrCache, capacity_for
from tierstore.cache.full import FullCache
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import KEY_ROW_BITS

POLICY_NAMES = ("lru", "lfu", "tinylfu")
every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


@every_policy
def test_arenas_are_aligned_words(policy: str) -> None:
    cache = DdrCache(7, weight_words=3, state_words=2, policy=policy)
    for arena, words in ((cache.weights, 3), (cache.state, 2)):
        assert (arena.shape, arena.dtype) == ((7, words), np.uint64)
        assert arena.flags.c_contiguous
        assert arena.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("policy", "stated_bytes", "fixed_bytes"), [("lru", 39, 500), ("lfu", 55, 500), ("tinylfu", 55, 37_800)]
)
def test_overhead_is_what_is_stated_and_what_is_allocated(policy: str, stated_bytes: int, fixed_bytes: int) -> None:
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
    # Python's own objects: the cache, its tuple and its arrays' headers; with TinyLFU those of four small caches, too.
    assert 0 <= allocated_bytes - cache.size_bytes < (18_000 if policy == "tinylfu" else 12_000)


@every_policy
@pytest.mark.parametrize(("words", "budget_bytes"), [((32, 1), 4096), ((0, 0), 400), ((1, 0), 1_000_003)])
def test_capacity_is_the_largest_that_fits(policy: str, words: tuple[int, int], budget_bytes: int) -> None:
    sizes = {"weight_words": words[0], "state_words": words[1]}
    capacity = capacity_for(policy, budget_bytes, **sizes)
    if capacity:
        assert DdrCache(capacity, policy=policy, **sizes).size_bytes <= budget_bytes
    assert DdrCache(capacity + 1, policy=policy, **sizes).size_bytes > budget_bytes


def test_capacity_is_bounded_by_the_slot_type() -> None:
    assert capacity_for("lru", 2**60, weight_words=1, state_words=0) == 2**31 - 2
    for capacity in (2**31 - 1, 0):
        with pytest.raises(ValueError, match="capacity"):
            DdrCache(capacity, weight_words=1, state_words=0, policy="lru")


def test_memory_is_taken_as_slots_are_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = DdrCache(2**22, weight_words=64, state_words=8, policy="lfu")
    assert cache.size_bytes > 2**31
    assert process.memory_info().rss - before < 2**26


@pytest.mark.kernel
@every_policy
def test_stamps_start_over(policy: str) -> None:
    """Key 3 keeps stamp 1, which the admission after the last number has again."""
    cache = DdrCache(4, weight_words=0, state_words=0, policy=policy)
    visit(cache, 3)
    cache._cache_state.tallies[Tally.STAMP] = 2**31 - 2
    assert admitted(cache, 2, 1).progress[STAMP] == 2**31 - 1
    again = Admission(keys_from(1, 2, 3, 1))
    assert cache.admit(again) is AdmitStatus.COMPLETE
    assert again.progress[STAMP] == 1
    assert again.inverse.tolist() == [0, 1, 2, 0]
    assert (again.num_unique, cache.num_pinned, again.num_missing) == (3, 3, 0)
    cache.check_integrity()


@pytest.mark.kernel
@pytest.mark.parametrize("policy", ["lfu", "tinylfu"])
def test_admission_passes_each_pinned_slot_once(policy: str) -> None:
    """Half of the cache is pinned and first in line; a scan from the start for each victim would take minutes."""
    capacity = 100_000 if JIT_ENABLED else 200
    half = capacity // 2
    cache = DdrCache(capacity, weight_words=0, state_words=0, policy=policy)
    cache.access(np.arange(capacity, dtype=np.int64))
    first = cache.find(np.arange(half, dtype=np.int64))
    cache.mark_dirty(first)
    take(cache, first)
    admission = Admission(np.arange(capacity, capacity + half, dtype=np.int64))
    assert cache.admit(admission) is AdmitStatus.COMPLETE
    assert set(order_of(cache)) == {*range(half), *range(capacity, capacity + half)}
    assert cache.admit(Admission(keys_from(-1))) is AdmitStatus.ALL_PINNED


@pytest.mark.kernel
@every_policy
def test_misuse_by_the_owner_is_refused(policy: str) -> None:
    cache = DdrCache(1, weight_words=2, state_words=1, policy=policy)
    visit(cache, 1)
    cache.mark_dirty(cache.find(keys_from(1)))
    with pytest.raises(AssertionError, match="dirty"):
        cache.access(keys_from(2))
    stopped = Admission(keys_from(2))
    assert cache.admit(stopped) is AdmitStatus.DIRTY_VICTIM
    cache.admit(Admission(keys_from(1)))
    with pytest.raises(AssertionError, match="another admission"):
        cache.admit(stopped)
    cache = DdrCache(4, weight_words=2, state_words=1, policy=policy)
    free = next(each for each in range(4) if each != admitted(cache, 1).slots[0])
    for slot in (-1, free, 4, 2**31 - 1):
        for action in ("filled", "pin", "unpin", "mark_dirty", "keys_of", "evict"):
            with pytest.raises(AssertionError):
                getattr(cache, action)(np.array([slot], np.int32))
            cache.check_integrity()


@pytest.mark.kernel
def test_rows_lie_table_by_table() -> None:
    tables = {4: range(5), 1: range(10, 13), 7: range(1, 5)}
    cache = FullCache(tables, weight_words=2, state_words=1)
    slots = np.arange(12, dtype=np.int32)
    keys = cache.numbering.keys_at(slots)
    assert keys.tolist() == [table << KEY_ROW_BITS | row for table in (1, 4, 7) for row in tables[table]]
    assert cache.numbering.first_slots(np.array([1, 4, 7])).tolist() == [0 - 10, 3, 8 - 1]
    admission = Admission(keys[[5, 2]])
    cache.admit(admission)
    asked = np.array([2, 5, 7, 7, 5], np.int32)
    assert not cache.are_in(asked)
    assert cache.absent(asked).tolist() == [2, 5, 7], "a row that is loading is not in"
    fill(cache, admission)
    assert cache.are_in(asked[:2])
    assert cache.absent(asked).tolist() == [7]
    admitted(cache, *keys.tolist())
    assert cache.is_complete
    strangers = [*(table << KEY_ROW_BITS | row for table, row in [(1, 13), (1, 9), (7, 0), (2, 0), (8, 0)]), -1]
    assert cache.find(np.array([*strangers, keys[0]], np.int64)).tolist() == [-1] * 6 + [0]
    with pytest.raises(AssertionError, match="no row"):
        cache.admit(Admission(keys_from(strangers[0])))


NUM_REAL_LOOKUPS = 1_852_505
REAL_HIT_RATES: dict[tuple[str, int], float] = {
    ("lru", 20_000): 0.8033,
    ("lfu", 10_000): 0.7909,
    ("tinylfu", 2_000): 0.6898,
    ("tinylfu", 10_000): 0.8049,
}


def bare_cache(policy: str, capacity: int) -> DdrCache:
    return DdrCache(capacity, weight_words=0, state_words=0, policy=policy)


@pytest.fixture(scope="module")
def real_keys(criteo_path: Path) -> Int64s:
    return criteo_keys(criteo_path)


@pytest.mark.parametrize(("policy", "capacity"), REAL_HIT_RATES)
def test_hit_rates_on_real_lookups(real_keys: Int64s, policy: str, capacity: int) -> None:
    assert len(real_keys) == NUM_REAL_LOOKUPS
    cache = bare_cache(policy, capacity)
    hits = cache.access(real_keys)
    assert round(float(hits.mean()), 4) == REAL_HIT_RATES[policy, capacity]
    assert cache.counters().hits == np.count_nonzero(hits)
    cache.check_integrity()


def drifting(capacity: int, num: int) -> dict[str, Int64s]:
    """Rows by Zipf's law; any of the newest rows, each used five times; and both by turns."""
    rng, num_rows = np.random.default_rng(1), 20 * capacity
    weights = np.cumsum(1 / np.arange(1, num_rows + 1) ** 1.05)
    still = rng.permutation(num_rows)[np.searchsorted(weights, rng.random(num) * weights[-1])]
    sliding = (np.arange(num) / 5 + rng.random(num) * 0.9 * capacity).astype(np.int64)
    by_turns = np.where(np.arange(num) // (10 * capacity) % 2 == 0, still, sliding + (1 << 33))
    return {"still": still, "sliding": sliding, "by turns": by_turns}


DRIFT_CAPACITY = 500


def test_tinylfu_is_never_a_point_below_lru_on_drifting_ids() -> None:
    behind = {}
    for name, keys in drifting(DRIFT_CAPACITY, 200 * DRIFT_CAPACITY).items():
        lru, tiny = (bare_cache(policy, DRIFT_CAPACITY).access(keys).mean() for policy in ("lru", "tinylfu"))
        behind[name] = round(100 * float(lru - tiny), 2)
    assert max(behind.values()) < 1, behind
    assert behind["still"] < -5


@pytest.mark.kernel
@pytest.mark.parametrize(("policy", "kind"), [("lru", cachetools.LRUCache), ("lfu", cachetools.LFUCache)])
def test_evicts_as_cachetools_access_for_access(policy: str, kind: Any) -> None:
    cache, oracle = bare_cache(policy, 20), kind(20)
    for key in (np.random.default_rng(1).zipf(1.3, 2000) % 60).tolist():
        is_hit = oracle.get(key) is not None
        assert cache.access(np.array([key])).tolist() == [is_hit]
        if not is_hit:
            oracle[key] = 0
    assert order_of(cache) == [oracle.popitem()[0] for _ in range(20)]


@pytest.mark.kernel
def test_tinylfu_ages_and_lowers_its_levels_as_its_twin() -> None:
    capacity = 300
    turns = drifting(capacity, 60 * capacity)["by turns"]
    cache, oracle = bare_cache("tinylfu", capacity), TinyLFU(capacity)
    rates, bases = set(), []
    for keys in np.split(turns if JIT_ENABLED else turns[: 20 * capacity], 20):
        assert cache.access(keys).tolist() == [oracle.access(key) for key in keys.tolist()]
        rates.add(int(cache._cache_state.tallies[Tally.RATE]))
        bases.append(int(cache._cache_state.tallies[Tally.BASE]))
        cache.check_integrity()
    assert len(rates) > 2
    assert not JIT_ENABLED or bases != sorted(bases)
    assert order_of(cache) == list(oracle.eviction_order())
