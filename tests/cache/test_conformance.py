"""The contract of tierstore/cache/base.py, for every cache."""

from typing import Any

import cachetools
import pytest

from tests.cache.reference import ReferenceCache
from tests.conformance.row_cache import RowCacheConformance, SettledTinyLFU
from tierstore.cache.base import RowCache
from tierstore.cache.ddr import DdrCache
from tierstore.kernels.jit import JIT_ENABLED


class Lru(RowCacheConformance):
    oracle_class = cachetools.LRUCache
    policy = "lru"

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> RowCache:
        return DdrCache(capacity, policy=self.policy, weight_words=weight_words, state_words=state_words)


class Lfu(Lru):
    oracle_class = cachetools.LFUCache
    policy = "lfu"


class TinyLfu(Lru):
    oracle_class = SettledTinyLFU
    policy = "tinylfu"


class Fast:
    num_accesses = 20_000 if JIT_ENABLED else 2000
    pytestmark = pytest.mark.kernel


class TestLru(Fast, Lru):
    pass


class TestLfu(Fast, Lfu):
    pass


class TestTinyLfu(Fast, TinyLfu):
    pass


class Reference:
    """Nothing is replayed by it."""

    test_a_cache_without_rows_simulates = None
    test_access_replays_as_cachetools_access_for_access = None
    test_replay_needs_a_quiet_cache = None
    policy: Any

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> RowCache:
        return ReferenceCache(capacity, weight_words=weight_words, state_words=state_words, policy=self.policy)


class TestReferenceLru(Reference, Lru):
    pass


class TestReferenceLfu(Reference, Lfu):
    pass


class TestReferenceTinyLfu(Reference, TinyLfu):
    pass
