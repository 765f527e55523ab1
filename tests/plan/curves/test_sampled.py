"""Samples of rows: what is in them, and how far their curves are from the exact ones."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.data import criteo_keys
from bench.planning.curves import one_by_one, sampled_errors
from bench.workload import ids_of
from tierstore.plan.curves import POLICIES
from tierstore.plan.curves.sampled import sample_of, sample_warning


@pytest.mark.kernel
@given(
    keys=st.lists(st.integers(0, 60), min_size=1, max_size=200),
    rate=st.floats(0.02, 0.99),
    seed=st.integers(0, 2**32),
)
def test_rows_are_in_a_sample_with_all_their_accesses(keys: list[int], rate: float, seed: int) -> None:
    array = np.array(keys, np.int64) << 35
    num_rows = len(set(keys))
    try:
        sample = sample_of(one_by_one(array), rate, seed)
    except ValueError:
        assert num_rows * rate < 1
        return
    chosen = set(sample.keys.tolist())
    assert abs(len(chosen) - num_rows * rate) < 1
    assert sample.keys.tolist() == [key for key in array.tolist() if key in chosen]
    assert sample.starts.tolist() == [0, *np.cumsum([key in chosen for key in array.tolist()]).tolist()]
    assert sample.rate == rate


@pytest.mark.kernel
def test_one_of_ten_is_taken_of_the_hot_the_warm_and_the_cold() -> None:
    """Sixty rows of each of three counts: six of each, whatever the seed."""
    keys = np.concatenate([np.repeat(np.arange(60) + 60 * i, 4**i) for i in range(3)])
    taken = []
    for seed in range(8):
        chosen = np.unique(sample_of(one_by_one(keys), 0.1, seed).keys)
        assert np.bincount(chosen // 60).tolist() == [6, 6, 6]
        taken.append(tuple(chosen.tolist()))
    assert len(set(taken)) == 8


def test_every_row_is_in_a_sample_with_the_same_probability() -> None:
    keys = np.repeat(np.arange(40), np.arange(1, 41))
    counts = np.zeros(40)
    for seed in range(2000):
        counts[np.unique(sample_of(one_by_one(keys), 0.25, seed).keys)] += 1
    # 500 expected; the standard deviation is below 19.4.
    assert abs(counts - 500).max() < 4 * 19.4


def test_popular_rows_whose_counts_have_more_than_sixteen_bits() -> None:
    keys = np.repeat(np.arange(4), [200_000, 100_000, 3, 2])
    chosen = {tuple(np.unique(sample_of(one_by_one(keys), 0.5, seed).keys)) for seed in range(50)}
    assert chosen <= {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_all_rows_are_no_sample() -> None:
    accesses = one_by_one(np.arange(5))
    assert sample_of(accesses, 1.0) == (accesses.keys, accesses.starts, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenth_of_skewed_rows_is_within_a_point(policy: str) -> None:
    """Mean over twenty sizes and over seeds; a hash alone is further off."""
    keys = ids_of(np.random.default_rng(2), 20_000, 200_000, 1.05)
    (error,) = sampled_errors("zipf", one_by_one(keys), [policy], rate=0.1, num_seeds=3)
    assert error.mean_points < 1
    assert error.mean_points < np.mean(error.plain_points)


def test_a_hundredth_of_real_rows_is_within_a_point(criteo_path: Path) -> None:
    """Each seed, not the mean of seeds."""
    (error,) = sampled_errors("criteo", one_by_one(criteo_keys(criteo_path)), ["lru"], rate=0.01)
    assert error.sampled_rows == 2000
    assert max(error.points) < 1
    assert np.mean(error.plain_points) > 2 * error.mean_points


def test_a_warning_says_how_far_off_and_what_to_take_instead() -> None:
    assert sample_warning(100, 0.01, 1.0) == (
        "100 sampled rows say little: hit rates may be off by 1.5 points, 5 at worst; take 0.062 of the rows"
    )
    assert sample_warning(289, 0.001, 0.001).endswith("by 4.1 points, 10 at worst; record 0.025 of the rows")
    assert sample_warning(100, 0.5, 1.0).endswith("take every row")
    assert sample_warning(0, 0.5, 0.5).endswith("record every row")
    for rows, rate, recorded in ((10, 1.0, 1.0), (625, 0.01, 1.0), (7225, 0.1, 0.1)):
        assert sample_warning(rows, rate, recorded) == ""
        assert rate == 1 or sample_warning(rows - 1, rate, recorded)
