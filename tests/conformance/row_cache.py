"""What every row cache that evicts must do. A subclass names its cache; histories are those of ``tests/cache``.

The oracle of evictions is a plain cachetools cache, or a TinyLFU of that kind, driven one access at a time.
"""

from typing import Any, Final

import cachetools
import numpy as np
import pytest

from tests.cache.reference_policies import TinyLFU
from tierstore.cache.base import Admission, AdmitStatus, Pinned
from tierstore.kernels.arrays import Int32s, Int64s


def keys_from(*values: int) -> Int64s:
    return np.array(values, np.int64)


def slots_from(*values: int) -> Int32s:
    return np.array(values, np.int32)


def order_of(cache: Any) -> list[int]:
    """Keys, next victim first."""
    return cache.keys_of(cache.resident_slots()).tolist()


def fill(cache: Any, admission: Admission) -> None:
    """Its rows that were missing are in place."""
    cache.filled(admission.unique_slots[admission.inverse[admission.missing[: admission.num_missing]]])


def admitted(cache: Any, *values: int) -> Admission:
    """These keys, pinned and filled."""
    admission = Admission(keys_from(*values))
    assert cache.admit(admission) == AdmitStatus.COMPLETE
    fill(cache, admission)
    return admission


def take(cache: Any, slots: Int32s) -> Pinned:
    """The dirty ones of these, clean and pinned."""
    pinned = Pinned(len(slots))
    cache.take(slots, pinned, frozen=False)
    cache.settle(pinned.slots)
    return pinned


def visit(cache: Any, *values: int) -> None:
    """Admit and let go, one key at a time."""
    for value in values:
        cache.release(admitted(cache, value))


def oracle_access(oracle: "cachetools.Cache[int, int]", key: int) -> bool:
    if key in oracle:
        oracle[key]
        return True
    oracle[key] = 0
    return False


def oracle_order(oracle: "cachetools.Cache[int, int]") -> list[int]:
    """Empties the oracle."""
    return [oracle.popitem()[0] for _ in range(len(oracle))]


class SettledTinyLFU(TinyLFU):
    """Each access is a call of its own."""

    def __getitem__(self, key: int) -> int:
        self.begin(1)
        slot = super().__getitem__(key)
        self.settle([key])
        return slot

    def __setitem__(self, key: int, slot: int) -> None:
        self.begin(1)
        super().__setitem__(key, slot)
        self.settle([key])


ORACLES: Final[dict[str, Any]] = {
    "lru": cachetools.LRUCache, "lfu": cachetools.LFUCache, "tinylfu": SettledTinyLFU
}  # fmt: skip
"""By policy."""


class RowCacheConformance:
    """Subclass as ``TestX``, with ``make``, which makes a cache of ``policy``."""

    policy: Any
    num_accesses = 2000

    @pytest.fixture(autouse=True, params=ORACLES)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.policy = request.param

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> Any:
        raise NotImplementedError

    # Shape

    @pytest.mark.parametrize("capacity", [1, 7])
    def test_arenas_are_aligned_words(self, capacity: int) -> None:
        cache = self.make(capacity, weight_words=3, state_words=2)
        assert cache.capacity == capacity
        for arena, words in ((cache.weights, 3), (cache.state, 2)):
            assert (arena.shape, arena.dtype) == ((capacity, words), np.uint64)
            assert arena.flags.c_contiguous
            assert arena.flags.writeable
            assert arena.ctypes.data % 64 == 0
        assert cache.size_bytes >= cache.weights.nbytes + cache.state.nbytes

    # Admission

    def test_calls_of_two_admissions_do_not_mix(self) -> None:
        cache = self.make(1)
        visit(cache, 1)
        cache.mark_dirty(cache.find(keys_from(1)))
        stopped = Admission(keys_from(2))
        assert cache.admit(stopped) is AdmitStatus.DIRTY_VICTIM
        cache.admit(Admission(keys_from(1)))
        with pytest.raises(AssertionError, match="another admission"):
            cache.admit(stopped)

    # Eviction

    def test_evicts_as_cachetools_access_for_access(self) -> None:
        rng = np.random.default_rng(1)
        cache, oracle = self.make(20), ORACLES[self.policy](20)
        for key in (rng.zipf(1.3, self.num_accesses) % 60).tolist():
            admission = Admission(keys_from(key))
            assert cache.admit(admission) is AdmitStatus.COMPLETE
            assert (admission.num_missing == 0) == oracle_access(oracle, key)
            fill(cache, admission)
            cache.release(admission)
        assert order_of(cache) == oracle_order(oracle)
        cache.check_integrity()

    # Misuse by the owner

    def test_slots_without_a_row_are_refused(self) -> None:
        cache = self.make(4)
        held = admitted(cache, 1)
        free = next(each for each in range(4) if each != held.slots[0])
        for slot in (-1, free, 4, 2**31 - 1):
            for action in ("filled", "pin", "unpin", "mark_dirty", "keys_of", "evict"):
                with pytest.raises(AssertionError):
                    getattr(cache, action)(slots_from(slot))
                cache.check_integrity()
