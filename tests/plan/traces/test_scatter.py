"""The permutation of a table's rows."""

import numpy as np
import pytest

from tests.plan.traces.chi_square import deviation, scatter
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.traces.zipf import scatter_of

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
def test_no_two_numbers_meet(seed: int) -> None:
    for rows in (*range(1, 40 if JIT_ENABLED else 12), 255, 256, 257):
        found = scatter(np.arange(rows), scatter_of(rows, seed))
        assert sorted(found.tolist()) == list(range(rows))


def test_first_numbers_are_scattered() -> None:
    rows, count = 3_000_000, 40_000 if JIT_ENABLED else 1000
    found = scatter(np.arange(count), scatter_of(rows, 9))
    regions = np.bincount(found * 50 // rows, minlength=50)
    assert abs(deviation(regions, np.full(50, 1 / 50))) < 4
    # Neighbours do not stay neighbours.
    assert (np.abs(np.diff(found)) < rows // 1000).mean() < 0.01
