"""Grouping a batch's ids: distinct keys by cache set, the positions of each in id-list order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cache.hbm_books import mixed, sets_of
from tierstore.hbm.grouping import Grouping, group
from tierstore.rows import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES

LAST_KEY = (MAX_TABLES - 1) << KEY_ROW_BITS | (MAX_ROWS - 1)
MASK = 2**64 - 1


def set_of(key: int, num_sets: int) -> int:
    """In Python's integers, apart from the code."""
    mix = key
    mix = ((mix ^ mix >> 30) * 0xBF58476D1CE4E5B9) & MASK
    mix = ((mix ^ mix >> 27) * 0x94D049BB133111EB) & MASK
    return (mix >> 32) * num_sets >> 32


def check(keys: list[int], num_sets: int) -> Grouping:
    made = group(torch.tensor(keys), num_sets)
    distinct = made.keys.tolist()
    assert sorted(distinct) == sorted(set(keys))
    assert made.groups.num_unique == len(distinct)
    assert made.sets.tolist() == [set_of(key, num_sets) for key in distinct] == sorted(made.sets.tolist())
    assert made.keys[made.inverse.long()].tolist() == keys
    order, starts = made.groups.order.tolist(), made.groups.starts.tolist()
    assert (starts[0], starts[-1]) == (0, len(keys))
    for number, key in enumerate(distinct):
        positions = order[starts[number] : starts[number + 1]]
        assert positions == [position for position, other in enumerate(keys) if other == key]
    dtypes = [tensor.dtype for tensor in (made.keys, made.sets, made.inverse, made.groups.order, made.groups.starts)]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int32, torch.int64]
    return made


rows = st.one_of(st.integers(0, 30), st.integers(0, LAST_KEY), st.sampled_from([0, MAX_ROWS - 1, MAX_ROWS, LAST_KEY]))


@given(keys=st.lists(rows, min_size=1, max_size=120), num_sets=st.sampled_from([1, 2, 3, 1000, 2**26, 2**31 - 1]))
def test_any_keys(keys: list[int], num_sets: int) -> None:
    check(keys, num_sets)


@pytest.mark.parametrize("keys", [[7], [7] * 300, list(range(300)), list(range(299, -1, -1))])
def test_one_key_and_many(keys: list[int]) -> None:
    check(keys, 7)


def test_a_hot_row_among_many() -> None:
    random = np.random.default_rng(0)
    check(np.where(random.random(2000) < 0.5, 5, random.integers(0, 500, 2000)).tolist(), 12)


def test_mixing_loses_no_key_and_spreads_neighbours_over_sets() -> None:
    """Neighbouring rows of neighbouring tables, as the hottest rows of many tables are."""
    keys = torch.cat([torch.arange(2000) | table << KEY_ROW_BITS for table in range(26)])
    mix = mixed(keys)
    assert len(mix.unique()) == len(keys)
    ordered = mix.sort().values
    assert torch.equal(sets_of(ordered, 999), sets_of(ordered, 999).sort().values)
    filled = torch.bincount(sets_of(mix, 1625), minlength=1625)
    # 32 a set on the average; a Poisson variable of that mean is above 64 once in ten million.
    assert filled.max() <= 64
    assert filled.min() >= 6
    assert abs(filled.double().var().item() / 32 - 1) < 0.15
