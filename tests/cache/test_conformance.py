"""The contract of tierstore/cache/base.py, for every cache in host memory."""

import cachetools
import pytest

from tests.conformance.row_cache import RowCacheConformance
from tierstore._jit import JIT_ENABLED
from tierstore.cache import RowCache, make_cache


class Lru(RowCacheConformance):
    oracle_class = cachetools.LRUCache
    policy = "lru"

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> RowCache:
        return make_cache(self.policy, capacity, weight_words=weight_words, state_words=state_words)


class Lfu(Lru):
    oracle_class = cachetools.LFUCache
    policy = "lfu"


@pytest.mark.kernel
class TestLru(Lru):
    num_accesses = 20_000 if JIT_ENABLED else 2000


@pytest.mark.kernel
class TestLfu(Lfu):
    num_accesses = 20_000 if JIT_ENABLED else 2000


class TestReferenceLru(Lru):
    policy = "reference-lru"


class TestReferenceLfu(Lfu):
    policy = "reference-lfu"
