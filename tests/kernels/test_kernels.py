"""Kernels over rows in slots, compiled and as plain Python, against numpy."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import optim
from tierstore.kernels import slots as kernels
from tierstore.optim.rules import RUN, SUPER_RUN, merge_and_update, scratch

pytestmark = pytest.mark.kernel
NONE = np.empty(0, np.float32)
NO_MAX = np.empty((0, 0), np.int32)
jagged = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6)


def starts_of(bags: list[list[int]]) -> Any:
    return np.cumsum([0, *(len(bag) for bag in bags)]).astype(np.int64)


@given(keys=st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=40))
def test_unique_in_order(keys: list[int]) -> None:
    array = np.array(keys, np.int64)
    scratch = np.full(128, -1, np.int32)
    unique, inverse = np.empty_like(array), np.empty(len(keys), np.int32)
    count = kernels.unique_in_order(array, scratch, unique, inverse)
    assert unique[:count].tolist() == list(dict.fromkeys(keys))
    assert np.array_equal(unique[inverse], array)


class Grouped(NamedTuple):
    """Bags of row numbers, as ``group_rows`` lays them out; ``numbers`` are the rows, in order of first use."""

    numbers: list[int]
    bag_starts: Any
    slots: Any
    inverse: Any
    counts: Any
    starts: Any
    sources: Any
    factors: Any
    positions: Any
    bags: Any


def grouped(bags: list[list[int]], scale: Any = NONE, *, dim: int = 3, by_slot: bool = True) -> Grouped:
    """One table, one feature; a row's slot is its number."""
    flat = [row for bag in bags for row in bag]
    numbers = list(dict.fromkeys(flat))
    slots = np.array(flat, np.int32)
    inverse = np.array([numbers.index(row) for row in flat], np.int32)
    counts, number = np.array([len(numbers)], np.int64), np.full(10 if by_slot else 0, 3, np.int32)
    if by_slot:
        inverse[:], counts[:] = -7, -7
    made = Grouped(
        numbers, starts_of(bags), np.empty(len(flat), np.int32), inverse, counts, np.empty(len(flat) + 2, np.int64),
        np.empty(len(flat), np.int64), np.empty(len(scale), np.float32), *np.empty((2, len(flat)), np.int32),
    )  # fmt: skip
    kernels.group_rows(
        0, 1, np.array([0, len(bags)]), made.bag_starts, np.zeros(1, np.int32), len(bags), dim, slots, number,
        made.slots, made.inverse, scale, False, made.counts, made.starts, made.sources,
        made.factors, made.positions, made.bags,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("by_slot", [True, False])
@given(bags=jagged)
def test_group_rows(by_slot: bool, bags: list[list[int]]) -> None:
    flat = [row for bag in bags for row in bag]
    bag_of = [number for number, bag in enumerate(bags) for _ in bag]
    scale = np.arange(len(flat), dtype=np.float32)
    made = grouped(bags, scale, by_slot=by_slot)
    assert made.counts.tolist() == [len(made.numbers)]
    assert made.inverse.tolist() == [made.numbers.index(row) for row in flat]
    if by_slot:
        assert made.slots[: len(made.numbers)].tolist() == made.numbers
    for number, row in enumerate(made.numbers):
        group = slice(made.starts[number], made.starts[number + 1])
        expected = [position for position, value in enumerate(flat) if value == row]
        assert made.positions[group].tolist() == expected
        assert made.bags[group].tolist() == [bag_of[position] for position in expected]
        assert made.sources[group].tolist() == [3 * bag_of[position] for position in expected]
        assert made.factors[group].tolist() == expected


@pytest.mark.parametrize("cut", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mode", [kernels.SUM, kernels.MEAN, kernels.MAX])
@given(bags=jagged)
def test_pool_rows_in_one_part_or_two(mode: int, cut: float, bags: list[list[int]]) -> None:
    weights = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    slots = np.array([row for bag in bags for row in bag], np.int32)
    out = np.full((len(bags), 4), 7, np.float32)
    arg_max = np.full((len(bags), 3), -1, np.int32) if mode == kernels.MAX else NO_MAX
    middle = int(len(slots) * cut)
    for first, last in ((0, middle), (middle, len(slots))):
        kernels.pool_rows(
            0, len(bags), first, last, starts_of(bags), slots[first:last], NONE, mode, weights, 3, 0,
            np.ones(1, np.int32), len(bags), out, arg_max,
        )  # fmt: skip
    assert (out[:, 0] == 7).all()
    for number, bag in enumerate(bags):
        rows = weights[bag]
        if mode == kernels.MAX:
            expected = rows.max(0) if bag else np.zeros(3)
        else:
            total = np.zeros(3, np.float32)
            for row in rows:
                total += row
            expected = total / np.float32(len(bag)) if mode == kernels.MEAN and bag else total
        assert np.array_equal(out[number, 1:], expected)


def merged(bags: list[list[int]], gradient: Any, scale: Any, cut: int, arg_max: Any = NO_MAX) -> Any:
    """-(gradient of each of ten rows), from an update by SGD at rate 1 of rows of zeros, in two parts."""
    dim = gradient.shape[1]
    made = grouped(bags, scale, dim=dim)
    weights = np.zeros((10, dim), np.float32)
    hyper = np.array([optim.SGD(lr=1.0).hyper(1.0, 1)], np.float32)
    flags = np.zeros(10, np.uint8)
    for begin, end in ((0, cut), (cut, len(made.numbers))):
        merge_and_update(
            0, begin, 0, end, np.zeros(1, np.int64), np.zeros(1, np.int64), made.slots, made.counts, made.starts,
            made.sources, made.factors, made.positions, made.bags, arg_max, gradient.reshape(1, -1),
            np.zeros(1, np.int64), hyper, weights, np.empty((10, 0), np.float32), dim, 0, flags, 4,
            None, None, scratch(dim),
        )  # fmt: skip
    assert np.flatnonzero(flags == 4).tolist() == sorted(made.numbers)
    return weights


@given(bags=jagged)
def test_merge_and_update_is_independent_of_the_split(bags: list[list[int]]) -> None:
    flat = [row for bag in bags for row in bag]
    bag_of = [number for number, bag in enumerate(bags) for _ in bag]
    rng = np.random.default_rng(len(flat))
    gradient = rng.standard_normal((len(bags), 3)).astype(np.float32)
    scale = rng.random(len(flat)).astype(np.float32)
    expected = np.zeros((10, 3), np.float32)
    for position, row in enumerate(flat):
        expected[row] += scale[position] * gradient[bag_of[position]]
    assert np.array_equal(merged(bags, gradient, scale, len(set(flat)) // 2), -expected)


def in_order(terms: Any) -> Any:
    """Sum over the first axis, one term after another."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def in_canonical_order(terms: Any) -> Any:
    """Sum of float32 [n, dim]: runs of 64 terms, sums of 64 runs, and the sums of those."""
    runs = [in_order(terms[start : start + 64]) for start in range(0, len(terms), 64)]
    return in_order([in_order(runs[start : start + 64]) for start in range(0, len(runs), 64)])


COUNTS = [1, RUN - 1, RUN, RUN + 1, 2 * RUN, 3 * RUN + 5]
HOT_COUNTS = [SUPER_RUN - 1, SUPER_RUN, SUPER_RUN + 1, SUPER_RUN + RUN + 1]


@pytest.mark.parametrize(("count", "dim"), [*product(COUNTS, [3, 16, 64, 83]), *product(HOT_COUNTS, [83])])
def test_a_hot_row_is_merged_in_runs_and_super_runs(count: int, dim: int) -> None:
    """Two rows, one in each bag twice, so that neither's runs begin at a multiple of the run's length."""
    gradient = np.random.default_rng(count).standard_normal((count, dim)).astype(np.float32)
    expected = np.zeros((10, dim), np.float32)
    expected[7], expected[4] = in_canonical_order(gradient), in_canonical_order(np.repeat(gradient, 2, axis=0))
    if count > SUPER_RUN:
        assert not np.array_equal(expected[4], in_order(np.repeat(gradient, 2, axis=0)))
    assert np.array_equal(merged([[7, 4, 4]] * count, gradient, NONE, 1), -expected)


def tree_sum(terms: Any) -> Any:
    """Halves added to each other, by recursion: element ``i`` and ``i + half`` first."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_sum(np.array([terms[i] + terms[half + i] for i in range(half)], np.float32))


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 9, 16, 20, 33, 64, 128])
def test_sums_over_columns_are_halving_trees(dim: int) -> None:
    rng = np.random.default_rng(dim)
    weights, gradient = rng.standard_normal((2, 4, dim)).astype(np.float32)
    padding = np.zeros((1 << (dim - 1).bit_length()) - dim, np.float32)
    place = np.arange(4, dtype=np.int32)
    scale = np.empty(4, np.float32)
    kernels.dot_rows(0, 4, 0, 4, np.arange(5), place, weights, dim, 0, np.zeros(1, np.int32), 4, gradient, scale)
    for row in range(4):
        assert scale[row] == tree_sum(np.concatenate([weights[row] * gradient[row], padding]))

    state = np.zeros((4, 1), np.float32)
    rule = optim.RowWiseAdagrad()
    made = grouped([[0], [1], [2], [3]], dim=dim)
    zero = np.zeros(1, np.int64)
    merge_and_update(
        0, 0, 0, 4, zero, zero, made.slots, made.counts, made.starts, made.sources, made.factors, made.positions,
        made.bags, NO_MAX, gradient.reshape(1, -1), np.array([rule.code]),
        np.array([rule.hyper(1.0, 1)], np.float32), weights, state, dim, 0, np.empty(0, np.uint8), 0, None, None,
        scratch(dim),
    )  # fmt: skip
    for row in range(4):
        squares = np.concatenate([gradient[row] * gradient[row], padding])
        assert state[row, 0] == tree_sum(squares) / np.float32(dim)


def test_join_ids_finds_the_first_wrong_id() -> None:
    ids = np.array([9, 10, 1, 5, 3, 4], np.int64)
    # Feature 0 owns ids[4:6], feature 1 owns ids[0:3].
    starts, firsts = np.array([4, 0], np.int64), np.array([0, 7 << 40], np.int64)
    bag_starts, keys = np.array([0, 1, 2, 4, 5], np.int64), np.empty(5, np.int64)
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([10, 10], np.int64), 2, bag_starts, keys) == 1
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([4, 11], np.int64), 2, bag_starts, keys) == 5
    assert kernels.join_ids(0, 4, ids, starts, firsts, np.array([10, 11], np.int64), 2, bag_starts, keys) == -1
    assert keys.tolist() == [3, 4, *((7 << 40) + row for row in (9, 10, 1))]
