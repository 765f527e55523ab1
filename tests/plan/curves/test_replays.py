"""Every policy, against caches in plain Python and loops over all that could be evicted."""

from functools import cache

import cachetools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.oracles import belady_hits, perfect_count_hits
from tests.conformance.row_cache import SettledTinyLFU, oracle_access
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.curves import POLICIES
from tierstore.plan.curves.replays import Replay, replay_of
from tierstore.plan.curves.sampled import Sample

pytestmark = pytest.mark.kernel
MANY = 2500 if JIT_ENABLED else 700
PEERS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache, "tinylfu": SettledTinyLFU}
ORACLES = {"perfect-lfu": perfect_count_hits, "opt": belady_hits}


def one_by_one(policy: str, keys: np.ndarray, bounds: list[int] | None = None) -> Replay:
    """Each access a batch of its own."""
    return replay_of(policy, Sample(keys, np.arange(len(keys) + 1), bounds or [0, len(keys)], 1.0))


def oracle_hits(policy: str, keys: np.ndarray, capacity: int) -> int:
    if policy in ORACLES:
        return ORACLES[policy](keys, capacity)
    peer = PEERS[policy](capacity)
    return sum(oracle_access(peer, key) for key in keys.tolist())


@pytest.mark.parametrize("policy", POLICIES)
@given(keys=st.lists(st.integers(0, 25), min_size=1, max_size=150), size=st.integers(1, 30))
def test_misses_are_those_of_a_plain_cache(policy: str, keys: list[int], size: int) -> None:
    array = np.array(keys, np.int64) << 33
    replay = one_by_one(policy, array)
    assert replay.num_rows == len(set(keys))
    assert replay.misses(np.array([float(size)])).tolist() == [[len(keys) - oracle_hits(policy, array, size)]]


@pytest.mark.parametrize("policy", POLICIES)
def test_skewed_accesses_at_several_sizes(policy: str) -> None:
    keys = np.random.default_rng(1).zipf(1.2, MANY) % 400
    sizes = [1, 2, 3, 10, 50, 200, 399, 1000]
    found = one_by_one(policy, keys).misses(np.array(sizes, np.float64))[0]
    assert found.tolist() == [len(keys) - oracle_hits(policy, keys, size) for size in sizes]


@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=12), size=st.integers(1, 4))
def test_no_choice_of_victims_beats_opt(keys: list[int], size: int) -> None:
    @cache
    def fewest(time: int, resident: frozenset[int]) -> int:
        if time == len(keys):
            return 0
        key = keys[time]
        if key in resident:
            return fewest(time + 1, resident)
        if len(resident) < size:
            return 1 + fewest(time + 1, resident | {key})
        return 1 + min(fewest(time + 1, resident - {victim} | {key}) for victim in resident)

    replay = one_by_one("opt", np.array(keys))
    assert replay.misses(np.array([float(size)])).tolist() == [[fewest(0, frozenset())]]


@pytest.mark.parametrize("policy", POLICIES)
def test_misses_fall_in_the_windows_where_they_happen(policy: str) -> None:
    keys = np.random.default_rng(2).zipf(1.3, 600) % 100
    bounds, sizes = [0, 100, 100, 350, 600], np.array([1.0, 7, 40, 100])
    found = one_by_one(policy, keys, bounds).misses(sizes)
    for window in range(len(bounds) - 1):
        upto, before = (one_by_one(policy, keys[:end]) for end in (bounds[window + 1], bounds[window]))
        if policy != "opt":  # which may break ties in another way where it sees less of the future
            assert found[window].tolist() == (upto.misses(sizes) - before.misses(sizes))[0].tolist()
    assert found.sum(0).tolist() == one_by_one(policy, keys).misses(sizes)[0].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_below_one_row_misses_go_in_a_line_to_all(policy: str) -> None:
    keys = np.random.default_rng(3).integers(0, 5, 200)
    replay = one_by_one(policy, keys)
    quarter, one = replay.misses(np.array([0.25, 1.0]))[0].tolist()
    assert quarter == 200 - 0.25 * (200 - one)


def test_between_sizes_the_misses_of_lru_go_in_a_line() -> None:
    keys = np.random.default_rng(4).integers(0, 9, 300)
    low, middle, high = one_by_one("lru", keys).misses(np.array([4.0, 4.75, 5.0]))[0].tolist()
    assert middle == 0.25 * low + 0.75 * high


@pytest.mark.parametrize("policy", POLICIES)
def test_progress_ends_where_it_said(policy: str) -> None:
    told: list[tuple[int, int]] = []
    sample = Sample(np.arange(100) % 7, np.arange(101), [0, 40, 100], 1.0)
    replay = replay_of(policy, sample, progress=lambda done, total: told.append((done, total)))
    replay.misses(np.array([2.0, 3.0]))
    assert told == sorted(told)
    assert told[-1] == (told[-1][1],) * 2


def test_an_unknown_policy_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"policy='lru2': did you mean 'lru'\?"):
        one_by_one("lru2", np.arange(3))
