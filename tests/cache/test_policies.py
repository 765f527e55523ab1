"""Hit rates on real lookups and on drifting ones; LRU and LFU against cachetools, TinyLFU against its twin."""

from pathlib import Path
from typing import Any

import cachetools
import numpy as np
import pytest

from bench.data import criteo_keys
from tests.cache.reference_policies import TinyLFU
from tests.cache.support import order_of
from tierstore.cache.cache_state import Tally
from tierstore.cache.ddr import DdrCache
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.jit import JIT_ENABLED

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
