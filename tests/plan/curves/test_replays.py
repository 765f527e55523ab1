"""Every policy, against caches in plain Python."""

import cachetools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.row_cache import SettledTinyLFU, oracle_access
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.accesses import Accesses, numbered
from tierstore.plan.curves import POLICIES
from tierstore.plan.curves.replays import Progress, Replay

pytestmark = pytest.mark.kernel
MANY = 2500 if JIT_ENABLED else 700
PEERS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache, "tinylfu": SettledTinyLFU}


def misses(policy: str, keys: np.ndarray, sizes: list[float], progress: Progress | None = None) -> list[float]:
    """Each access a batch of its own."""
    accesses = Accesses(keys, np.arange(len(keys) + 1), ("all",))
    found: list[float] = Replay(policy, accesses, numbered(keys), progress=progress).misses(np.array(sizes)).tolist()
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
def test_below_one_row_misses_go_in_a_line_to_all(policy: str) -> None:
    quarter, one = misses(policy, np.random.default_rng(3).integers(0, 5, 200), [0.25, 1.0])
    assert quarter == 200 - 0.25 * (200 - one)


def test_between_sizes_the_misses_of_lru_go_in_a_line() -> None:
    low, middle, high = misses("lru", np.random.default_rng(4).integers(0, 9, 300), [4.0, 4.75, 5.0])
    assert middle == 0.25 * low + 0.75 * high
