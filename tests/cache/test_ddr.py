"""What is the fast cache's own: its memory, its bounds, its arguments, and that check_integrity sees damage."""

import tracemalloc

import numpy as np
import psutil
import pytest

from tests.conformance.row_cache import admitted, keys_from, order_of, take, visit
from tierstore.cache.base import STAMP, Admission, AdmitStatus
from tierstore.cache.cache_state import Tally
from tierstore.cache.ddr import OVERHEAD_BYTES, DdrCache, capacity_for
from tierstore.kernels.jit import JIT_ENABLED

POLICY_NAMES = ("lru", "lfu", "tinylfu")


@pytest.mark.parametrize(
    ("policy", "stated_bytes", "fixed_bytes"),
    [("lru", 39, 500), ("lfu", 55, 500), ("tinylfu", 55, 37_800)],
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


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("weight_words", "state_words"), [(32, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("budget_bytes", [400, 1000, 4096, 1_000_003])
def test_capacity_is_the_largest_that_fits(policy: str, weight_words: int, state_words: int, budget_bytes: int) -> None:
    capacity = capacity_for(policy, budget_bytes, weight_words=weight_words, state_words=state_words)
    if capacity:
        cache = DdrCache(capacity, weight_words=weight_words, state_words=state_words, policy=policy)
        assert cache.size_bytes <= budget_bytes
    larger = DdrCache(capacity + 1, weight_words=weight_words, state_words=state_words, policy=policy)
    assert larger.size_bytes > budget_bytes


def test_capacity_is_bounded_by_the_slot_type() -> None:
    assert capacity_for("lru", 2**60, weight_words=1, state_words=0) == 2**31 - 2
    for capacity in (2**31 - 1, 0, -1):
        with pytest.raises(ValueError, match="capacity"):
            DdrCache(capacity, weight_words=1, state_words=0, policy="lru")


def test_memory_is_taken_as_slots_are_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = DdrCache(2**22, weight_words=64, state_words=8, policy="lfu")
    assert cache.size_bytes > 2**31
    assert process.memory_info().rss - before < 2**26


@pytest.mark.kernel
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_stamps_start_over(policy: str) -> None:
    cache = DdrCache(4, weight_words=0, state_words=0, policy=policy)
    # Key 3 keeps stamp 1, which the admission after the last number has again.
    visit(cache, 3)
    cache._cache_state.tallies[Tally.STAMP] = 2**31 - 2
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
def test_admission_passes_each_pinned_slot_once(policy: str) -> None:
    # Half of the cache is pinned and first in line; a scan from the start for each victim would take minutes.
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
    cache.check_integrity()


@pytest.mark.kernel
@pytest.mark.parametrize("prepare", ["admit", "mark_dirty", "freeze"])
def test_replay_needs_a_quiet_cache(prepare: str) -> None:
    cache = DdrCache(2, weight_words=1, state_words=0, policy="lru")
    visit(cache, 1)
    if prepare == "admit":
        admitted(cache, 1)
    else:
        cache.mark_dirty(cache.find(keys_from(1)))
    if prepare == "freeze":
        cache.freeze()
    with pytest.raises(AssertionError, match=r"pinned|dirty"):
        cache.access(keys_from(2))
