"""The contract of tierstore/cache/base.py, for every cache."""

import cachetools
import pytest

from tests.conformance.row_cache import RowCacheConformance, SettledTinyLFU
from tierstore.cache import RowCache, make_cache
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
