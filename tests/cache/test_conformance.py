"""The contract of tierstore/cache/base.py, for every cache; the device cache on the CPU."""

import cachetools
import pytest
import torch

from tests.conformance.row_cache import RowCacheConformance, SettledTinyLFU
from tierstore.cache import RowCache, make_cache
from tierstore.cache.hbm import HbmCache
from tierstore.kernels.jit import JIT_ENABLED


class Lru(RowCacheConformance):
    oracle_class = cachetools.LRUCache
    policy = "lru"

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> RowCache:
        return make_cache(self.policy, capacity, weight_words=weight_words, state_words=state_words)


class Lfu(Lru):
    oracle_class = cachetools.LFUCache
    policy = "lfu"


class TinyLfu(Lru):
    oracle_class = SettledTinyLFU
    policy = "tinylfu"


class LookaheadUnannounced(Lru):
    """Without announcements it is LRU."""

    policy = "lookahead"


@pytest.mark.kernel
class TestLru(Lru):
    num_accesses = 20_000 if JIT_ENABLED else 2000


@pytest.mark.kernel
class TestLfu(Lfu):
    num_accesses = 20_000 if JIT_ENABLED else 2000


@pytest.mark.kernel
class TestTinyLfu(TinyLfu):
    num_accesses = 20_000 if JIT_ENABLED else 2000


@pytest.mark.kernel
class TestLookahead(LookaheadUnannounced):
    num_accesses = 20_000 if JIT_ENABLED else 2000


class TestReferenceLru(Lru):
    policy = "reference-lru"


class TestReferenceLfu(Lfu):
    policy = "reference-lfu"


class TestReferenceTinyLfu(TinyLfu):
    policy = "reference-tinylfu"


class TestReferenceLookahead(LookaheadUnannounced):
    policy = "reference-lookahead"


class HbmLru(Lru):
    num_accesses = 2000
    device = "cpu"

    # What leaves next depends on the set; the order of admissions is not known.
    test_victims_are_the_unclean_ones_of_those_that_leave_next = None
    test_slots_are_told_in_the_order_of_their_last_admissions = None

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> RowCache:
        return HbmCache(
            capacity,
            weight_words=weight_words,
            state_words=state_words,
            policy=self.policy,  # type: ignore[arg-type]
            device=torch.device(self.device),
        )


class TestHbmLru(HbmLru):
    pass


class TestHbmLfu(HbmLru):
    oracle_class = cachetools.LFUCache
    policy = "lfu"


class OnGpu:
    """What the suite does to arenas in host memory, it cannot do here; tests/gpu checks the rows."""

    device = "cuda"
    num_accesses = 500

    test_arenas_are_aligned_words = None
    test_rows_stay_in_place_until_they_are_evicted = None


@pytest.mark.gpu
class TestHbmLruOnGpu(OnGpu, HbmLru):
    pass


@pytest.mark.gpu
class TestHbmLfuOnGpu(OnGpu, TestHbmLfu):
    pass
