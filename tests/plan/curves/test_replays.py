"""Every policy, against caches in plain Python."""

import cachetools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.row_cache import SettledTinyLFU, oracle_access
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.accesses import numbered
from tierstore.plan.curves import POLICIES
from tierstore.plan.curves.replays import Progress, Replay
from tierstore.plan.curves.sampled import Sample

pytestmark = pytest.mark.kernel
MANY = 2500 if JIT_ENABLED else 700
PEERS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache, "tinylfu": SettledTinyLFU}


def misses(policy: str, keys: np.ndarray, sizes: list[float], progress: Progress | None = None) -> list[float]:
    """Each access a batch of its own."""
    sample = Sample(keys, np.arange(len(keys) + 1), 1.0)
    found: list[float] = Replay(policy, sample, numbered(keys), progress=progress).misses(np.array(sizes)).tolist()
    return found


def oracle_misses(policy: str, keys: np.ndarray, capacity: int) -> int:
    peer = PEERS[policy](capacity)
    return len(keys) - sum(oracle_access(peer, key) for key in keys.tolist())


@pytest.mark.parametrize("policy", POLICIES)
@given(keys=st.lists(st.integers(0, 25), min_size=1, max_size=150), size=st.integers(1, 30))
def test_misses_are_those_of_a_plain_cache(policy: str, keys: list[int], size: int) -> None:
    array = np.array(keys, np.int64) << 33
    assert misses(policy, array, [float(size)]) == [oracle_misses(policy, array, size)]


@pytest.mark.parametrize("policy", POLICIES)
def test_skewed_accesses_at_several_sizes(policy: str) -> None:
    keys = np.random.default_rng(1).zipf(1.2, MANY) % 400
    sizes = [1, 2, 3, 10, 50, 200, 399, 1000]
    assert misses(policy, keys, sizes) == [oracle_misses(policy, keys, size) for size in sizes]


@pytest.mark.parametrize("policy", POLICIES)
def test_below_one_row_misses_go_in_a_line_to_all(policy: str) -> None:
    quarter, one = misses(policy, np.random.default_rng(3).integers(0, 5, 200), [0.25, 1.0])
    assert quarter == 200 - 0.25 * (200 - one)


def test_between_sizes_the_misses_of_lru_go_in_a_line() -> None:
    low, middle, high = misses("lru", np.random.default_rng(4).integers(0, 9, 300), [4.0, 4.75, 5.0])
    assert middle == 0.25 * low + 0.75 * high


@pytest.mark.parametrize("policy", POLICIES)
def test_progress_ends_where_it_said(policy: str) -> None:
    told: list[tuple[int, int]] = []
    misses(policy, np.arange(100) % 7, [2.0, 3.0], lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (told[-1][1],) * 2
