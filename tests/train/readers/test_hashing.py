"""Feature hashing against the formula in Python's own integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.train.readers import FeatureHasher

pytestmark = pytest.mark.kernel
MASK = 2**64 - 1


def splitmix64(seed):
    z = seed & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def expected_ids(categories, sizes, mode):
    values, offsets = [], [0]
    for column, size in enumerate(sizes):
        for row in categories:
            category = row[column]
            if category >= 0:
                mixed = splitmix64(category + (column + 1) * 0x9E3779B97F4A7C15) if mode == "mix" else category
                values.append(mixed % size)
            offsets.append(len(values))
    return values, offsets


@given(
    st.lists(st.lists(st.integers(-1, 2**63 - 1), min_size=3, max_size=3), max_size=8),
    st.lists(st.integers(1, 2**40), min_size=3, max_size=3),
    st.sampled_from(["mix", "mod"]),
)
def test_ids_follow_the_documented_formula(categories, sizes, mode):
    ids = FeatureHasher(sizes, mode=mode)(np.array(categories, np.int64).reshape(-1, 3))
    values, offsets = expected_ids(categories, sizes, mode)
    assert ids.values.tolist() == values
    assert ids.offsets.tolist() == offsets


def test_hashing_spreads_neighbours_evenly_and_unlike_in_each_column():
    categories = np.repeat(np.arange(20_000)[:, None], 2, axis=1)
    ids = FeatureHasher([100, 100])(categories).values.reshape(2, -1)
    for column in ids:
        counts = np.bincount(column, minlength=100)
        # 200 expected, standard deviation 14.
        assert counts.min() > 130
        assert counts.max() < 270
    assert (ids[0] == ids[1]).mean() < 0.02


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="at least one row"):
        FeatureHasher([3, 0])
    with pytest.raises(ValueError, match="mode='md5'"):
        FeatureHasher([3], mode="md5")
    with pytest.raises(ValueError, match="2 columns for 1 tables"):
        FeatureHasher([3])(np.zeros((1, 2), np.int64))
