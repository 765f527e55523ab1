"""Slots that a cache does not have."""

from contextlib import suppress

import numpy as np
import pytest

from tests.cache.test_conformance import LookaheadUnannounced, Lru, TinyLfu
from tests.conformance.row_cache import RowCacheConformance, keys_from


@pytest.mark.kernel
@pytest.mark.parametrize("kind", [Lru, TinyLfu, LookaheadUnannounced])
@pytest.mark.parametrize("slot", [-1, 3])
def test_slots_out_of_range_hold_no_row(kind: type[RowCacheConformance], slot: int) -> None:
    cache = kind().make_of(3, 1, 2, 3)
    cache.mark_dirty(cache.find(keys_from(1, 2, 3)))
    cache.freeze()
    outside = np.array([slot], np.int32)
    with suppress(IndexError):
        assert cache.frozen_of(outside).tolist() == []
    with suppress(IndexError):
        assert not cache.is_loading(outside)
    with pytest.raises((AssertionError, IndexError)):
        cache.keys_of(outside)
