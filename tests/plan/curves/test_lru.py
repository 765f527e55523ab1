"""Stack distances, against a list that is searched from the top."""

import functools
import itertools
import operator
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.accesses import numbered
from tierstore.plan.curves.replays import StackDistances

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


def histograms(keys: np.ndarray, *bounds: int) -> list[dict[int, int]]:
    """One for each part of the keys."""
    accesses = numbered(keys)
    stack, found = StackDistances(accesses), []
    for begin, end in itertools.pairwise((0, *bounds, len(keys))):
        histogram = np.zeros(accesses.num_rows, np.int64)
        stack.count(begin, end, histogram)
        found.append(told(histogram))
    return found


@given(parts=st.lists(st.lists(st.integers(0, 90), max_size=150), min_size=1, max_size=4), shift=st.integers(0, 40))
def test_any_accesses_in_any_parts(parts: list[list[int]], shift: int) -> None:
    before = Counter[int]()
    bounds = list(itertools.accumulate(map(len, parts)))
    keys: list[int] = functools.reduce(operator.iadd, parts, [])
    for found, end in zip(histograms(np.array(keys, np.int64) << shift, *bounds[:-1]), bounds, strict=True):
        upto = searched(keys[:end])
        assert found == {key: n - before[key] for key, n in upto.items() if n > before[key]}
        before = Counter(upto)


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 300, 1025, MANY // 20])
def test_many_accesses(num_rows: int) -> None:
    """Rows come from all over the map, and from beside each other."""
    rng = np.random.default_rng(num_rows)
    popular = np.minimum(rng.geometric(20 / (num_rows + 20), MANY), num_rows) - 1
    keys = np.where(rng.random(MANY) < 0.2, rng.integers(0, num_rows, MANY), popular)
    assert histograms(keys) == [searched(keys.tolist())]


def test_a_loop_over_more_rows_than_a_level_counts() -> None:
    """Each distance is that of all others, whatever the levels between."""
    num_rows = 70_000 if JIT_ENABLED else 1_500
    down = np.arange(num_rows)[::-1]
    found = histograms(np.concatenate([down, down, down, down[::-1]]), 3 * num_rows)
    assert found == [{num_rows - 1: 2 * num_rows}, dict.fromkeys(range(num_rows), 1)]
