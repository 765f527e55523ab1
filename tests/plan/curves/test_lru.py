"""Stack distances, against a list that is searched from the top."""

import functools
import operator
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.curves.lru import StackDistances

pytestmark = pytest.mark.kernel
MANY = 40_000 if JIT_ENABLED else 3_000


def searched(keys: list[int]) -> dict[int, int]:
    """Accesses by distance; a row's first access has none."""
    counts: Counter[int] = Counter()
    stack: list[int] = []
    for key in keys:
        if key in stack:
            counts[stack.index(key)] += 1
            stack.remove(key)
        stack.insert(0, key)
    return dict(counts)


def told(histogram: np.ndarray) -> dict[int, int]:
    return {int(distance): int(histogram[distance]) for distance in np.flatnonzero(histogram)}


@given(parts=st.lists(st.lists(st.integers(0, 90), max_size=150), max_size=4), shift=st.integers(0, 40))
def test_any_accesses_in_any_parts(parts: list[list[int]], shift: int) -> None:
    stack, before = StackDistances(), Counter[int]()
    for index, part in enumerate(parts):
        stack.access(np.array(part, np.int64) << shift)
        upto = searched(functools.reduce(operator.iadd, parts[: index + 1], []))
        assert told(stack.take_histogram()) == {key: n - before[key] for key, n in upto.items() if n > before[key]}
        before = Counter(upto)
    assert stack.num_rows == len(set(functools.reduce(operator.iadd, parts, [])))


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 300, 1025, MANY // 20])
def test_many_accesses_move_the_map_and_the_entries(num_rows: int) -> None:
    """Far more accesses than the map has bits; rows come from all over it, and from beside each other."""
    rng = np.random.default_rng(num_rows)
    popular = np.minimum(rng.geometric(20 / (num_rows + 20), MANY), num_rows) - 1
    keys = np.where(rng.random(MANY) < 0.2, rng.integers(0, num_rows, MANY), popular)
    stack = StackDistances()
    stack.access(keys)
    assert told(stack.histogram) == searched(keys.tolist())


def test_a_loop_over_more_rows_than_a_level_counts() -> None:
    """Each distance is that of all others, whatever the levels between."""
    num_rows = 70_000 if JIT_ENABLED else 1_500
    stack = StackDistances()
    for _ in range(3):
        stack.access(np.arange(num_rows)[::-1])
    assert told(stack.histogram) == {num_rows - 1: 2 * num_rows}
    stack.take_histogram()
    stack.access(np.arange(num_rows))
    assert told(stack.histogram) == dict.fromkeys(range(num_rows), 1)
