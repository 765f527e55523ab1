"""The contract of tierstore/cache/base.py, for every cache that evicts; test_full.py is for the one that does not."""

from typing import Any

import pytest

from tests.cache.reference import ReferenceCache
from tests.conformance.row_cache import RowCacheConformance
from tierstore.cache.ddr import DdrCache
from tierstore.kernels.jit import JIT_ENABLED


@pytest.mark.kernel
class TestDdr(RowCacheConformance):
    num_accesses = 20_000 if JIT_ENABLED else 2000

    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> Any:
        return DdrCache(capacity, weight_words=weight_words, state_words=state_words, policy=self.policy)


class TestReference(RowCacheConformance):
    def make(self, capacity: int, *, weight_words: int = 2, state_words: int = 1) -> Any:
        return ReferenceCache(capacity, weight_words=weight_words, state_words=state_words, policy=self.policy)
