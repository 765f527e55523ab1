"""Stack distances, against a list that is searched from the top."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.accesses import numbered
from tierstore.plan.curves import distances

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


def found_in(keys: np.ndarray, skip: int = 0) -> dict[int, int]:
    return told(distances(numbered(keys), skip=skip))


@given(keys=st.lists(st.integers(0, 90), max_size=400), skip=st.integers(0, 400), shift=st.integers(0, 40))
def test_any_accesses_behind_any_that_are_skipped(keys: list[int], skip: int, shift: int) -> None:
    before = Counter(searched(keys[:skip]))
    found = found_in(np.array(keys, np.int64) << shift, min(skip, len(keys)))
    assert found == {key: n - before[key] for key, n in searched(keys).items() if n > before[key]}


@pytest.mark.parametrize("num_rows", [1, 65, MANY // 20])
def test_many_accesses(num_rows: int) -> None:
    """Rows come from all over the map, and from beside each other."""
    rng = np.random.default_rng(num_rows)
    popular = np.minimum(rng.geometric(20 / (num_rows + 20), MANY), num_rows) - 1
    keys = np.where(rng.random(MANY) < 0.2, rng.integers(0, num_rows, MANY), popular)
    assert found_in(keys) == searched(keys.tolist())
