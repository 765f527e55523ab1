"""Kernels over rows in slots, compiled and as plain Python, against numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import slots as kernels
from tierstore.kernels.hashing import SECRET

pytestmark = pytest.mark.kernel
jagged = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6)


def starts_of(bags: list[list[int]]) -> Any:
    return np.cumsum([0, *(len(bag) for bag in bags)]).astype(np.int64)


@given(keys=st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=40))
def test_unique_in_order(keys: list[int]) -> None:
    array = np.array(keys, np.int64)
    scratch = np.full(128, -1, np.int32)
    unique, inverse = np.empty_like(array), np.empty(len(keys), np.int32)
    count = kernels.unique_in_order(array, scratch, unique, inverse, SECRET)
    assert unique[:count].tolist() == list(dict.fromkeys(keys))
    assert np.array_equal(unique[inverse], array)


@given(bags=jagged, batch=st.integers(1, 3))
def test_positions_are_ordered_by_sample(bags: list[list[int]], batch: int) -> None:
    bags = bags[: len(bags) // batch * batch]
    sample_of = [i % batch for i, bag in enumerate(bags) for _ in bag]
    order = np.empty(len(sample_of), np.int32)
    kernels.order_by_sample(starts_of(bags), batch, order)
    assert order.tolist() == sorted(range(len(sample_of)), key=lambda position: sample_of[position])


@given(bags=jagged)
def test_group_rows(bags: list[list[int]]) -> None:
    """Of one table with one feature of three columns; a row's slot is its number."""
    flat = [row for bag in bags for row in bag]
    bag_of = [number for number, bag in enumerate(bags) for _ in bag]
    numbers, count = list(dict.fromkeys(flat)), len(flat)
    inverse, counts, number = np.full(count, -7, np.int32), np.full(1, -7), np.full(10, 3, np.int32)
    slots, scale, factors = np.empty(count, np.int32), *np.arange(2 * count, dtype=np.float32).reshape(2, -1)
    starts, sources = np.empty(count + 2, np.int64), np.empty(count, np.int64)
    positions, bags_of = np.empty((2, count), np.int32)
    kernels.group_rows(
        0, 1, np.array([0, len(bags)]), starts_of(bags), np.zeros(1, np.int32), len(bags), 3, np.array(flat, np.int32),
        number, slots, inverse, scale, False, counts, starts, sources, factors, positions, bags_of,
    )  # fmt: skip
    assert counts.tolist() == [len(numbers)]
    assert inverse.tolist() == [numbers.index(row) for row in flat]
    assert slots[: len(numbers)].tolist() == numbers
    for place, row in enumerate(numbers):
        group = slice(starts[place], starts[place + 1])
        expected = [position for position, value in enumerate(flat) if value == row]
        assert positions[group].tolist() == factors[group].tolist() == expected
        assert bags_of[group].tolist() == [bag_of[position] for position in expected]
        assert sources[group].tolist() == [3 * bag_of[position] for position in expected]


def test_join_ids_finds_the_first_wrong_id() -> None:
    ids = np.array([9, 10, 1, 5, 3, 4], np.int64)
    # Feature 0 owns ids[4:6], feature 1 owns ids[0:3].
    starts, firsts = np.array([4, 0], np.int64), np.array([0, 7 << 40], np.int64)
    bag_starts, keys = np.array([0, 1, 2, 4, 5], np.int64), np.empty(5, np.int64)
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([10, 10], np.int64), 2, bag_starts, keys) == 1
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([4, 11], np.int64), 2, bag_starts, keys) == 5
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([10, 11], np.int64), 2, bag_starts, keys) == -1
    assert keys.tolist() == [3, 4, *((7 << 40) + row for row in (9, 10, 1))]
