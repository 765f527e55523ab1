"""The sample of rows, against SplitMix64 in Python's own integers."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.trace.sampling import ALL, is_sampled, last_hash, select

RATES = (1.0, 0.5, 0.3, 0.01, 2.0**-20)


def hashed(key: int) -> int:
    word = 2**64 - 1
    mixed = (key + 0x9E3779B97F4A7C15) & word
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & word
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & word
    return mixed ^ (mixed >> 31)


def keys_of(count: int, seed: int = 0) -> NDArray[np.int64]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 22, count) << 40 | generator.integers(0, 1 << 40, count)


def test_a_row_is_sampled_by_its_hash() -> None:
    keys = keys_of(3000)
    for rate in RATES:
        assert is_sampled(keys, rate).tolist() == [hashed(key) < rate * 2**64 for key in keys.tolist()]
    assert is_sampled(keys, 1.0).all()
    assert last_hash(1.0) == ALL


def test_a_lower_rate_samples_some_of_the_rows_of_a_higher_one() -> None:
    keys = np.arange(20_000)
    chosen = [set(np.flatnonzero(is_sampled(keys, rate)).tolist()) for rate in RATES]
    assert all(lower <= higher for higher, lower in pairwise(chosen))
    # Five standard deviations of a binomial count.
    for rate, rows in zip(RATES, chosen, strict=True):
        assert abs(len(rows) - rate * len(keys)) <= 5 * (rate * (1 - rate) * len(keys)) ** 0.5


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan"), 2.0**-65])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0, and at most 1"):
        last_hash(rate)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("id_type", [np.int64, np.int32])
@pytest.mark.parametrize("batch", [0, 1, 7])
def test_select_takes_the_sampled_rows_in_order(rate: float, id_type: type, batch: int) -> None:
    """Three features of a batch of five, not in its order, two of one table; some have more ids than a block."""
    generator = np.random.default_rng(batch)
    lengths = generator.integers(0, 30, (5, batch))
    lengths[3, :1] = 90
    ids = generator.integers(0, 500, lengths.sum()).astype(id_type)
    begins = np.append(0, np.cumsum(lengths.sum(1)))
    features, tables = [3, 0, 4], [7, 2, 2]
    bag_starts = np.append(0, np.cumsum(lengths[features].ravel()))
    expected = [
        (key, position)
        for position, key in enumerate(
            table << 40 | int(row)
            for feature, table in zip(features, tables, strict=True)
            for row in ids[begins[feature] : begins[feature + 1]]
        )
        if hashed(key) < rate * 2**64
    ]
    found = np.empty((2, bag_starts[-1]), np.int64)
    firsts, num_rows = np.array(tables, np.int64) << 40, np.full(3, 500)
    lookups = np.full(9, 100)
    count = select(ids, begins[features], firsts, num_rows, batch, bag_starts, last_hash(rate), found, lookups)
    assert list(map(tuple, found[:, :count].T.tolist())) == expected
    of_table = {2: lengths[[0, 4]].sum(), 7: lengths[3].sum()}
    assert lookups.tolist() == [100 + of_table.get(table, 0) for table in range(9)]
